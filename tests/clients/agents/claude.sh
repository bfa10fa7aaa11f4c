# Claude Code: Anthropic's API.
export ANTHROPIC_BASE_URL="$WEFT_URL" ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL="$WEFT_MODEL" ANTHROPIC_DEFAULT_HAIKU_MODEL="$WEFT_MODEL"
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="$CONTEXT"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 # no telemetry, no updates
claude -p "$TASK" --allowedTools Write,Read,Bash
claude -p "$QUESTION" --continue
