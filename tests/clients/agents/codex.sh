# Codex: OpenAI's Responses API. `--sandbox workspace-write` would let it write in this folder only,
# where the system allows sandboxes.
mkdir -p ~/.codex
cat > ~/.codex/config.toml <<END
model = "$WEFT_MODEL"
model_provider = "weft"
model_context_window = $CONTEXT
check_for_update_on_startup = false
[model_providers.weft]
name = "Weft"
base_url = "$WEFT_URL/v1"
wire_api = "responses"
[analytics]
enabled = false
END
codex exec --skip-git-repo-check --sandbox danger-full-access "$TASK"
codex exec --skip-git-repo-check resume --last "$QUESTION"
