# Qwen Code: OpenAI's Chat Completions. It needs Node.js 22 or later.
mkdir -p ~/.qwen
cat > ~/.qwen/settings.json <<END
{
  "general": {"enableAutoUpdate": false},
  "model": {"generationConfig": {"modalities": {"image": true}}},
  "privacy": {"usageStatisticsEnabled": false},
  "security": {"auth": {"selectedType": "openai"}}
}
END
export OPENAI_BASE_URL="$WEFT_URL/v1" OPENAI_API_KEY=none OPENAI_MODEL="$WEFT_MODEL"
export QWEN_CODE_MAX_OUTPUT_TOKENS=4096
qwen --yolo "$TASK"
qwen --yolo --continue "$QUESTION"
