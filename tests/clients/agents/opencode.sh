# opencode: OpenAI's Chat Completions.
mkdir -p ~/.config/opencode
cat > ~/.config/opencode/opencode.json <<END
{
  "autoupdate": false,
  "share": "disabled",
  "model": "weft/$WEFT_MODEL",
  "small_model": "weft/$WEFT_MODEL",
  "compaction": {"auto": ${COMPACTION:-true}},
  "provider": {
    "weft": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Weft",
      "options": {"baseURL": "$WEFT_URL/v1"},
      "models": {
        "$WEFT_MODEL": {
          "limit": {"context": $CONTEXT, "output": 4096},
          "attachment": true,
          "modalities": {"input": ["text", "image"], "output": ["text"]}
        }
      }
    }
  }
}
END
export OPENCODE_DISABLE_MODELS_FETCH=1
opencode run "$TASK"
opencode run --continue "$QUESTION"
