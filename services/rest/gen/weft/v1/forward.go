package weftv1

import "weft.dev/weft/services/rest/internal/forward"

// The generated handlers look their forwarders up in package variables. Written by hand: the stock
// one appends a delimiter to every message and loses Retry-After and status overrides.
func init() {
	forward_OpenAIService_ChatCompletions_0 = forward.Stream
	forward_OpenAIService_Completions_0 = forward.Stream
	forward_OpenAIService_Transcriptions_0 = forward.Stream
	forward_OpenAIService_Translations_0 = forward.Stream
	forward_ResponsesService_CreateResponse_0 = forward.Stream
	forward_PoolingService_CreateEmbeddings_0 = forward.Stream
	forward_PoolingService_EmbedTexts_0 = forward.Stream
	forward_PoolingService_RerankDocuments_0 = forward.Stream
	forward_PoolingService_RerankDocuments_1 = forward.Stream
	forward_PoolingService_RerankDocuments_2 = forward.Stream
	forward_PoolingService_ScorePairs_0 = forward.Stream
	forward_PoolingService_ScorePairs_1 = forward.Stream
	forward_PoolingService_ClassifyTexts_0 = forward.Stream
	forward_PoolingService_ClassifyTexts_1 = forward.Stream
	forward_PoolingService_PoolTexts_0 = forward.Stream
	forward_AnthropicService_CreateMessage_0 = forward.Stream
	forward_OllamaService_Chat_0 = forward.Stream
	forward_OllamaService_Generate_0 = forward.Stream
	forward_OllamaService_Embed_0 = forward.Stream
	forward_OllamaService_EmbedPrompt_0 = forward.Stream
	forward_TrainerService_GenerateTokens_0 = forward.Stream
	forward_TrainerService_ContinueTokens_0 = forward.Stream
	forward_MeshService_WatchMesh_0 = forward.Events
}
