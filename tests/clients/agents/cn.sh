# Continue: OpenAI's Chat Completions.
mkdir -p ~/.continue
cat > ~/.continue/config.yaml <<END
name: Weft
version: 1.0.0
schema: v1
models:
  - name: Weft
    provider: openai
    model: $WEFT_MODEL
    apiBase: $WEFT_URL/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: $CONTEXT, maxTokens: 4096}
END
export CONTINUE_TELEMETRY_ENABLED=0
cn --config ~/.continue/config.yaml --auto -p "$TASK"
cn --config ~/.continue/config.yaml --resume -p "$QUESTION"
