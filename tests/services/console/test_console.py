"""The console in a real browser, before a real gateway with scripted workers and before made-up
meshes.
"""

from __future__ import annotations

import base64
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="chromium: the package `playwright` is not installed")

from playwright.async_api import expect
from weft.contract.codec.walk import duration
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.models.tiny_images import add_images, encoded, image_tokenizer, random_image
from weft.testing.services.browser import Console, console
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL
from weft.testing.services.mesh_stream import GATEWAY, made_mesh, mesh_stream
from weft.v1 import mesh_pb2, trace_pb2

pytestmark = [pytest.mark.needs("go", "chromium"), pytest.mark.timeout(300)]

TOKEN = "an operators' token of some length"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def chat(edge: DialectEdge) -> str:
    """Id of a chat that has been answered."""
    answer = await edge.post("/v1/chat/completions", CHAT)
    return str(answer.json()["id"])


async def test_the_console_shows_and_operates_a_mesh(rest_binary: Path, tmp_path: Path) -> None:
    """Every view once, and one action, in one browser."""
    (tmp_path / "token").write_text(TOKEN)
    async with (
        dialect_edge(
            rest_binary,
            tmp_path,
            num_decode=2,
            num_prefill=1,
            console="operate",
            admin_token_file=tmp_path / "token",
        ) as edge,
        console(edge.url, tmp_path) as shown,
    ):
        ids = [await chat(edge) for _ in range(3)]
        await shown.open()
        await shown.live()
        await expect(shown.page.locator("#role")).to_have_text("read only")
        fleet = await shown.view("Fleet")
        for name in ("decode-0", "decode-1", "prefill-0"):
            await expect(fleet.locator(".member", has_text=name)).to_be_visible()
        await shown.shoot("mesh-fleet")

        load = await shown.view("Load")
        await expect(load.locator("canvas")).to_have_count(8)
        await load.get_by_label("as tables").check()
        await expect(load.get_by_role("table").first).to_be_visible()

        requests = await shown.view("Requests")
        await expect(requests.locator("tbody tr")).to_have_count(3)
        # Handles, not ids, without the token.
        for one in ids:
            await expect(requests.get_by_title(one)).to_have_count(0)
        await requests.locator(".rows tbody tr").first.get_by_role("button").click()
        await expect(requests.locator(".waterfall")).to_contain_text("prepare")
        await requests.get_by_role("button", name="attempt 1").click()
        await expect(requests.locator(".waterfall .details:visible")).to_contain_text("decode-")
        await shown.shoot("mesh-requests")

        models = await shown.view("Models")
        await expect(models.get_by_role("row", name=MODEL)).to_contain_text("ready")

        playground = await shown.view("Chat")
        await playground.get_by_label("Message", exact=True).fill("What is Weft?")
        await shown.page.keyboard.press("Enter")
        await expect(playground.get_by_role("log", name="Conversation A")).to_contain_text(
            edge.text
        )
        # Who has asked knows the id.
        await playground.get_by_role("link", name="timeline").click()
        await expect(requests.get_by_role("heading", name="Timeline")).to_contain_text("chatcmpl-")
        await expect(requests.locator(".waterfall")).to_contain_text("prepare")

        await give_token(shown, "wrong" * 5)
        await expect(shown.page.locator("#role")).to_have_text("read only")
        await give_token(shown, TOKEN)
        await expect(shown.page.locator("#role")).to_have_text("operator")
        await shown.view("Requests")
        await expect(requests.get_by_title(ids[0])).to_be_visible()
        await (await shown.view("Fleet")).locator(".lane.gateway .member").click()
        await shown.page.get_by_role("button", name="Flush cache").click()
        await shown.page.get_by_role("button", name="Flush", exact=True).click()
        await shown.said("pages flushed")


async def give_token(shown: Console, token: str) -> None:
    await shown.page.get_by_role("button", name="Keys").click()
    await shown.page.get_by_label("Operators’ token").fill(token)
    await shown.page.get_by_role("button", name="Use").click()
    await shown.live()


@pytest.mark.full
async def test_it_is_off_where_keys_are_needed_and_none_is_given(
    rest_binary: Path, tmp_path: Path
) -> None:
    keys = {name: new_key("t", manages_adapters=name == "manager") for name in ("user", "manager")}
    write_keys(tmp_path / "keys.json", [entry for _, entry in keys.values()])
    async with (
        dialect_edge(
            rest_binary, tmp_path, api_keys_file=tmp_path / "keys.json", wait=False
        ) as edge,
        console(edge.url, tmp_path) as shown,
    ):
        await shown.open()
        asked = shown.page.get_by_role("dialog", name="Keys")
        await expect(asked).to_be_visible()
        await shown.shoot("keys")
        await expect(shown.page.locator("#connection")).to_have_text("no access")
        await expect(shown.page.locator(".member")).to_have_count(0)
        await asked.get_by_label("API key").fill(keys["user"][0])
        await asked.get_by_role("button", name="Use").click()
        await expect(shown.page.locator("#banner")).to_contain_text("may not watch the mesh")
        await shown.page.get_by_role("button", name="Keys").click()
        await shown.page.get_by_label("API key").fill(keys["manager"][0])
        await shown.page.get_by_role("button", name="Use").click()
        await shown.live()
        await expect(shown.page.locator(".member", has_text="decode-0")).to_be_visible()
        # No address and no page keeps a key.
        assert keys["manager"][0] not in shown.page.url
        assert await shown.page.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.full
async def test_chats_with_tools_schemas_and_two_models(rest_binary: Path, tmp_path: Path) -> None:
    async with (
        dialect_edge(rest_binary, tmp_path) as edge,
        console(edge.url, tmp_path) as shown,
    ):
        await shown.open()
        await shown.live()
        section = await shown.view("Chat")
        log = section.get_by_role("log", name="Conversation A")

        async def say(text: str) -> None:
            await section.get_by_label("Message", exact=True).fill(text)
            await section.get_by_role("button", name="Send", exact=True).click()

        edge.text = "<think>A hard one.</think>It is <b>4</b><img src=x onerror=alert(1)>."
        await section.get_by_label("System message").fill("Be brief.")
        await say("2 + 2?")
        await expect(log).to_contain_text("It is <b>4</b><img src=x onerror=alert(1)>.")
        await expect(log.locator("b, img")).to_have_count(0)
        assert "system: Be brief." in edge.prompt

        await section.get_by_label("two models beside each other").check()
        edge.text = "Twice."
        await say("again")
        for name in ("A", "B"):
            await expect(section.get_by_role("log", name=f"Conversation {name}")).to_contain_text(
                "Twice."
            )
        await shown.shoot("chat-two")
        await section.get_by_label("two models beside each other").uncheck()
        await section.get_by_role("button", name="Clear").click()

        await section.get_by_text("Tools", exact=True).click()
        await section.get_by_role("button", name="example").first.click()
        call = {"name": "get_weather", "arguments": {"city": "Uppsala"}}
        edge.text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        await say("Rain?")
        await expect(log.locator(".call")).to_contain_text('get_weather({"city": "Uppsala"})')
        await log.get_by_label("Result of get_weather").fill("sunny")
        edge.text = "No rain."
        await log.get_by_role("button", name="Send results").click()
        await expect(log).to_contain_text("No rain.")
        assert "tool: sunny" in edge.prompt
        await shown.shoot("chat-tools")
        await section.get_by_label("JSON list").fill("[")
        await say("broken")
        await expect(section.get_by_role("alert")).to_contain_text("Tools:")
        await section.get_by_label("JSON list").fill("")

        await section.get_by_text("Answer’s schema", exact=True).click()
        await section.get_by_role("button", name="example").last.click()
        edge.text = '{"answer": "yes", "confidence": 1}'
        await say("In JSON")
        await expect(log).to_contain_text('"confidence": 1')
        assert edge.submit.sampling.constraint.ByteSize()

        edge.is_cut, edge.text = True, "on and on " * 200
        await section.get_by_label("JSON schema").fill("")
        await say("Endless?")
        await section.get_by_role("button", name="Stop").click()
        await expect(section.get_by_role("button", name="Send", exact=True)).to_be_enabled()
        await say("Cleared?")
        await expect(log.locator("[aria-busy] .text")).to_contain_text("on and on")
        await section.get_by_role("button", name="Clear").click()
        await expect(section.get_by_role("button", name="Send", exact=True)).to_be_enabled()
        edge.is_cut, edge.text = False, "Anew."
        await say("again")
        await expect(log).to_contain_text("Anew.")
        assert "on and on" not in edge.prompt


DROP = """(data) => {
  const files = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  files.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
  const how = { bubbles: true, cancelable: true };
  const event = new DragEvent("drop", { dataTransfer: files, ...how });
  document.querySelector(".composer").dispatchEvent(event);
}"""
PASTE = DROP.replace("dropped", "pasted").replace(
    'DragEvent("drop", { dataTransfer', 'ClipboardEvent("paste", { clipboardData'
)


async def test_chats_with_images(rest_binary: Path, tmp_path: Path) -> None:
    pictures = [encoded(random_image(seed, 90, 20)) for seed in range(4)]
    chosen = [
        {"name": f"{number}.png", "mimeType": "image/png", "buffer": data}
        for number, data in enumerate(pictures[:2])
    ]
    async with (
        dialect_edge(
            rest_binary,
            tmp_path,
            template="",
            tokenizer=image_tokenizer(),
            change_model=add_images,
            max_image_bytes=10_000,
            max_images=4,
        ) as edge,
        console(edge.url, tmp_path) as shown,
    ):
        await shown.open()
        await shown.live()
        section = await shown.view("Chat")
        log = section.get_by_role("log", name="Conversation A")
        waiting = section.get_by_role("group", name="Images of the message").locator("img")
        files = section.locator("input[type=file]")
        await files.set_input_files(chosen)
        await expect(waiting).to_have_count(2)
        for script, picture in ((DROP, pictures[2]), (PASTE, pictures[3])):
            await shown.page.evaluate(script, base64.b64encode(picture).decode())
        await expect(waiting).to_have_count(4)
        alert = section.get_by_role("alert")
        await files.set_input_files(chosen[:1])
        await expect(alert).to_contain_text("A request may have 4 images.")
        await section.get_by_role("button", name="Remove 1.png").click()
        await expect(waiting).to_have_count(3)
        for name, kind, data, problem in (
            ("a.png", "image/png", bytes(10_001), "a.png has 10 KiB"),
            ("a.txt", "text/plain", b"a", "a.txt: an image must be JPEG"),
        ):
            await files.set_input_files({"name": name, "mimeType": kind, "buffer": data})
            await expect(alert).to_contain_text(problem)
        await section.get_by_label("Message", exact=True).fill("What is it?")
        await shown.shoot("chat-images-composed")
        await section.get_by_role("button", name="Send", exact=True).click()
        await expect(log).to_contain_text(edge.text)
        await expect(waiting).to_have_count(0)
        await expect(log.locator(".user img")).to_have_count(3)
        assert edge.prompt.count("<global-img>") == 3
        assert "What is it?" in edge.prompt
        # The history goes along.
        await section.get_by_label("Message", exact=True).fill("And now?")
        await section.get_by_role("button", name="Send", exact=True).click()
        await expect(log.locator(".assistant")).to_have_count(2)
        await expect(section.get_by_role("button", name="Send", exact=True)).to_be_enabled()
        assert edge.prompt.count("<global-img>") == 3
        await shown.shoot("chat-images")


@pytest.mark.full
async def test_models_for_text_take_no_images(rest_binary: Path, tmp_path: Path) -> None:
    async with dialect_edge(rest_binary, tmp_path) as edge, console(edge.url, tmp_path) as shown:
        await shown.open()
        await shown.live()
        section = await shown.view("Chat")
        data = encoded(random_image(1, 90, 20))
        file = {"name": "a.png", "mimeType": "image/png", "buffer": data}
        await section.locator("input[type=file]").set_input_files(file)
        await expect(section.get_by_role("alert")).to_contain_text("This model takes no images.")
        await expect(section.locator(".thumbnail")).to_have_count(0)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_sixty_four_workers_in_any_window(
    rest_binary: Path, tmp_path: Path, scheme: Any
) -> None:
    mesh = made_mesh(decode=48, prefill=16, stores=2)
    ill = mesh.members[5]
    ill.healthy, ill.problem = False, "not reachable: connection refused"
    starting = mesh.members.add(member_id="decode-new", role=mesh_pb2.MEMBER_ROLE_DECODE)
    starting.start.phase, starting.start.fraction = "loading weights", 0.42
    starting.start.elapsed.CopyFrom(duration(13))
    plan = mesh.plans.add(planner_id="planner-0", model=MODEL, acts=True, wanted_decode=48)
    plan.seen_decode, plan.why = 47, "8.00 requests/s keep 2.4 prefill workers busy"
    plan.alarms.append("47 decode workers are ordered")
    for at in (2, 1):
        act = plan.history.add(text=f"worker-{at}: decode (was both)")
        act.time.FromJsonString(f"2026-01-01T08:30:0{at}Z")
    async with mesh_stream(rest_binary, tmp_path, mesh) as fake:
        for width in (1440, 1024, 390):
            async with console(fake.url, tmp_path, width=width, color_scheme=scheme) as shown:
                await shown.open()
                await shown.live()
                await expect(shown.page.locator(".member")).to_have_count(68)
                await expect(shown.page.locator(".starting li")).to_contain_text("42 %")
                told = shown.page.get_by_label("Plans")
                await expect(told).to_contain_text("planner-0 acts")
                await expect(told).to_contain_text("0 prefill, 48 decode")
                await expect(told).to_contain_text("worker-2: decode (was both)")
                alarm = told.locator(".chip.bad")
                await expect(alarm).to_contain_text("are ordered")
                place = await alarm.bounding_box()
                assert place is not None
                assert place["x"] + place["width"] <= width, "seen without scrolling"
                await expect(shown.page.locator(".member.bad")).to_have_count(1)
                for view in ("Fleet", "Load", "Requests", "Models", "Chat"):
                    await shown.view(view)
                    await shown.shoot(f"many-{view.lower()}-{scheme}-{width}")
                    wide = "document.documentElement.scrollWidth - innerWidth"
                    assert await shown.page.evaluate(wide) <= 0, (view, width)


HOSTILE = [
    "<img src=x onerror=\"window.struck='1'\">",
    "<script>window.struck='2'</script>",
    '"><svg onload="window.struck=\'3\'">',
    "javascript:window.struck='4'",
    "'}});window.struck='5';//",
    "\u202egnp.exe\u0000\u2028{{7*7}}",
]


@pytest.mark.full
async def test_no_name_becomes_a_script(rest_binary: Path, tmp_path: Path) -> None:
    mesh = made_mesh(decode=0, prefill=0, stores=0)
    for name in HOSTILE:
        mesh.members.add(
            member_id=name,
            role=mesh_pb2.MEMBER_ROLE_DECODE,
            address=name,
            model=name,
            problem=name,
            notices=[name],
            dtype=name,
            weight_format=name,
            epoch=name,
            transports=[name],
            breaker=name,
            task=name,
            tiers=[mesh_pb2.MemberTier(name=name)],
            start=mesh_pb2.MemberStart(phase=name),
        )
        mesh.flows.add(source_id=GATEWAY, target_id=name, kind=1, per_second=1)
        mesh.models.add(name=name, problem=name, task=name, has_chat=True)
        holder = mesh_pb2.MeshAdapterHolder(member_id=name, state=name, error=name)
        mesh.adapters.add(
            name=name, parent=name, digest=name, path=name, state="serving", holders=[holder]
        )
        mesh.ended_requests.add(request_id=name, model=name, worker_id=name, outcome=name)
    mesh.gateway_id = HOSTILE[0]
    async with (
        mesh_stream(rest_binary, tmp_path, mesh) as fake,
        console(fake.url, tmp_path) as shown,
    ):
        for name in HOSTILE:
            span = trace_pb2.Span(
                trace_id=secrets.token_bytes(16),
                span_id=secrets.token_bytes(8),
                name=name,
                service=name,
                instance=name,
                error=name,
            )
            span.attributes.update({name: name})
            fake.spans.append(span)
        await shown.open()
        await shown.live()
        markup = HOSTILE[0]
        fleet = await shown.view("Fleet")
        await expect(fleet.locator(".member .name", has_text=markup)).to_have_count(1)
        await fleet.locator(".member", has_text=markup).first.click()
        await expect(shown.page.get_by_role("dialog")).to_contain_text(markup)
        await shown.shoot("hostile-member")
        await shown.page.get_by_role("button", name="Drain").click()
        await shown.page.get_by_role("button", name="Drain").last.click()
        await shown.said(markup)
        await shown.page.keyboard.press("Escape")
        requests = await shown.view("Requests")
        await requests.locator("tbody tr").first.get_by_role("button").click()
        await expect(requests.locator(".waterfall")).to_contain_text(markup)
        for button in await requests.locator(".waterfall button").all():
            await button.click()
        await shown.shoot("hostile-requests")
        for view in ("Models", "Chat", "Load", "Fleet"):
            await expect(await shown.view(view)).to_be_visible()
        await shown.shoot("hostile-fleet")
        assert await shown.page.evaluate("window.struck") is None
        own = "[...document.scripts].map((one) => new URL(one.src).pathname)"
        assert set(await shown.page.evaluate(own)) == {
            "/console/app.js",
            "/console/vendor/uPlot.iife.min.js",
        }
        # Whatever got in would not run: the page's policy refuses it.
        refused = await shown.page.evaluate(
            "() => { try { document.body.insertAdjacentHTML('beforeend', '<b>'); return false; }"
            " catch (error) { return error instanceof TypeError; } }"
        )
        assert refused
        shown.problems = [one for one in shown.problems if "insertAdjacentHTML" not in one]
        shown.problems = [one for one in shown.problems if "TrustedHTML" not in one]


@pytest.mark.full
async def test_every_action_is_one_call(rest_binary: Path, tmp_path: Path) -> None:
    mesh = made_mesh()
    async with (
        mesh_stream(rest_binary, tmp_path, mesh) as fake,
        console(fake.url, tmp_path) as shown,
    ):
        page = shown.page
        await shown.open()
        await shown.live()
        card = page.locator(".member", has_text="decode-1")
        # By keyboard alone, from the card to the answer.
        await card.focus()
        await page.keyboard.press("Enter")
        member = page.get_by_role("dialog", name="decode-1")
        await expect(member).to_be_visible()
        await member.get_by_role("button", name="Drain").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name="Drain decode-1?")).to_be_visible()
        await page.keyboard.press("Escape")
        assert not fake.calls
        await member.get_by_role("button", name="Drain").click()
        await (
            page.get_by_role("dialog", name="Drain decode-1?")
            .get_by_role("button", name="Drain")
            .click()
        )
        await shown.said("decode-1 drains; 3 requests run there")
        await expect(card).to_contain_text("draining")
        await member.get_by_role("button", name="Undrain").click()
        await shown.said("decode-1 takes requests again")
        fake.num_elsewhere = 3
        await member.get_by_role("button", name="Flush cache").click()
        await page.get_by_role("button", name="Flush", exact=True).click()
        await shown.said("decode-1: 1,234 pages flushed")
        # What is outside an open dialog is not read out.
        await expect(member.locator("#toasts .toast").last).to_be_visible()
        await member.get_by_label("Log level").select_option("debug")
        await shown.said("decode-1 logs debug, not info any more")
        await expect(member.get_by_label("Log level")).to_have_value("")
        await shown.shoot("member")
        await page.keyboard.press("Escape")
        await expect(member).to_be_hidden()
        await expect(card).to_be_focused()
        await expect(page.locator("body > #toasts .toast").last).to_be_visible()
        await page.locator(".member", has_text="prefill-0").click()
        await page.get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("dialog", name="Drain prefill-0?")).to_contain_text(
            "No other prefill worker serves tiny"
        )
        await page.keyboard.press("Escape")
        await page.keyboard.press("Escape")

        fake.num_elsewhere, ended = 2, mesh.ended_requests[-1].request_id
        fake.spans.append(trace_pb2.Span(span_id=b"12345678", name="prepare", service="gateway"))
        requests = await shown.view("Requests")
        row = requests.locator("tbody tr").first
        await row.get_by_role("button").click()
        await expect(requests.locator(".waterfall")).to_contain_text("prepare")
        await expect(row).to_have_attribute("aria-current", "true")
        await expect(requests.get_by_role("heading", name=f"Timeline of {ended}")).to_be_visible()
        fake.num_elsewhere = 9
        await row.get_by_role("button").click()
        await expect(requests).to_contain_text("Answered by gateway-other")
        # Addresses that nobody encoded, or that name no view.
        for address in ("#requests/%", "#constructor"):
            await page.evaluate("address => { location.hash = address }", address)
        await expect(page.locator("#view-fleet")).to_be_visible()

        models = await shown.view("Models")
        await models.get_by_role("button", name="Load an adapter").click()
        form = page.get_by_role("dialog", name="Load an adapter")
        await form.get_by_label("Name", exact=True).fill("pirate")
        await form.get_by_label("Folder").fill("adapters/pirate")
        await form.get_by_label("keep it on every device").check()
        await shown.shoot("load-adapter")
        await form.get_by_role("button", name="Load", exact=True).click()
        await shown.said("pirate is loaded")
        await models.get_by_role("row", name="pirate").get_by_role("button", name="Unload").click()
        await page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        await shown.said("pirate is unloaded")
        await expect(models.get_by_role("row", name="pirate")).to_have_count(0)
        assert fake.calls == [
            mesh_pb2.DrainMemberRequest(member_id="decode-1"),
            mesh_pb2.UndrainMemberRequest(member_id="decode-1"),
            mesh_pb2.FlushMemberRequest(member_id="decode-1"),
            mesh_pb2.SetMemberLogLevelRequest(member_id="decode-1", level="debug"),
            mesh_pb2.LoadMeshAdapterRequest(
                name="pirate", path="adapters/pirate", model="tiny", pinned=True
            ),
            mesh_pb2.UnloadMeshAdapterRequest(name="pirate"),
        ]


@pytest.mark.full
async def test_tables_stand_in_for_charts_and_everything_has_a_name(
    rest_binary: Path, tmp_path: Path
) -> None:
    async with (
        mesh_stream(rest_binary, tmp_path, made_mesh()) as fake,
        console(fake.url, tmp_path) as shown,
    ):
        page = shown.page
        await page.route("**/vendor/*", lambda route: route.abort())
        await shown.open()
        await shown.live()
        load = await shown.view("Load")
        await expect(load).to_contain_text("tables are shown instead")
        await expect(load.get_by_role("table")).to_have_count(8)
        await shown.shoot("tables")
        for view in ("Fleet", "Load", "Requests", "Models", "Chat"):
            await shown.view(view)
            nameless = await page.evaluate(
                """() => [...document.querySelectorAll("button, a, input, select, textarea")]
                  .filter((one) => one.checkVisibility())
                  .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length
                    || one.textContent.trim()))
                  .map((one) => one.outerHTML)"""
            )
            assert not nameless
        for role in ("banner", "navigation", "main"):
            await expect(page.get_by_role(role)).to_have_count(1)
        await page.keyboard.press("Tab")
        await page.goto(f"{fake.url}/console#load")
        await page.reload()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
