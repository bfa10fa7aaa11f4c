"""Ollama's client: a picture in a chat and ahead of a prompt, from a file and as bytes."""

import ollama
from pictures import ANSWER, MODEL, PICTURE, QUESTION, SCENES, URL

client = ollama.Client(host=URL)
brief = {"num_predict": 24, "temperature": 0}
for image in (str(SCENES / "elephant.jpg"), PICTURE):
    ask = [{"role": "user", "content": QUESTION, "images": [image]}]
    chat = client.chat(model=MODEL, messages=ask, options=brief)
    assert chat.message.content == ANSWER
made = client.generate(model=MODEL, prompt=QUESTION, images=[PICTURE], options=brief)
assert made.response == ANSWER
assert "vision" in client.show(MODEL).capabilities
