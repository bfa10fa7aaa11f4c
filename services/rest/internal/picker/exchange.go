package picker

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/structpb"

	"weft.dev/weft/services/rest/gen/weft/extproc"
	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/reqinfo"
)

const (
	// The protocol's names.
	destination      = "x-gateway-destination-endpoint"
	destinationSpace = "envoy.lb"
	subset           = "x-gateway-destination-endpoint-subset"
	subsetSpace      = "envoy.lb.subset_hint"
	// What decides must have arrived within this time.
	bodyTimeout = 60 * time.Second
	// Some proxies take no larger pieces of a body than 64 KiB.
	maxPieceBytes = 62_000
)

// outcomes of refusals, for metrics.
var outcomes = map[int]string{
	http.StatusTooManyRequests:    "shed",
	http.StatusServiceUnavailable: "not_ready",
	http.StatusGatewayTimeout:     "late",
}

// errAnswered ends a stream whose request has its answer.
var errAnswered = errors.New("answered")

type received struct {
	message *extproc.ProcessingRequest
	err     error
}

// exchange is the stream of one HTTP request:
//
//	headers -> (pieces of the body, until its model is known) -> picked -> passes the rest on
//	                                                          -> refused: an answer, and the end
type exchange struct {
	picker *Picker
	stream extproc.ExternalProcessor_ProcessServer
	ctx    context.Context // with the shape of failures

	request *http.Request // without its body; nil before the headers
	modes   *extproc.ProtocolConfiguration
	allowed []string // addresses that may be picked; nil: all
	finder  modelFinder
	held    [][]byte // pieces of the body that have come before a pick
	taken   int64    // their bytes
	picked  bool
	release func() // of the picked endpoint
}

// Process implements extproc.ExternalProcessorServer.
func (p *Picker) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	x := &exchange{picker: p, stream: stream, ctx: stream.Context(), release: func() {}}
	p.config.Metrics.streams.Inc()
	defer p.config.Metrics.streams.Dec()
	defer func() {
		x.release()
		x.drop()
	}()
	err := x.run()
	if errors.Is(err, errAnswered) || errors.Is(err, io.EOF) || isEnd(err) {
		return nil
	}
	return err
}

func (x *exchange) run() error {
	messages := make(chan received)
	go x.receive(messages)
	timer := time.NewTimer(x.picker.config.bodyTimeout)
	defer timer.Stop()
	for {
		select {
		case <-x.ctx.Done():
			return x.ctx.Err()
		case <-timer.C:
			if !x.picked {
				return x.refuse(x.picker.late(), "late")
			}
		case one := <-messages:
			if one.err != nil {
				return one.err
			}
			if one.message.GetObservabilityMode() {
				continue // nothing that is said counts
			}
			if err := x.handle(one.message); err != nil {
				return err
			}
		}
	}
}

// receive ends with the stream, which ends with its handler.
func (x *exchange) receive(messages chan<- received) {
	for {
		message, err := x.stream.Recv()
		select {
		case messages <- received{message, err}:
		case <-x.stream.Context().Done():
			return
		}
		if err != nil {
			return
		}
	}
}

func (x *exchange) handle(message *extproc.ProcessingRequest) error {
	if modes := message.GetProtocolConfig(); modes != nil && x.modes == nil {
		x.modes = modes
	}
	switch part := message.GetRequest().(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		return x.requestHeaders(part.RequestHeaders, message.GetMetadataContext())
	case *extproc.ProcessingRequest_RequestBody:
		return x.requestBody(part.RequestBody)
	case *extproc.ProcessingRequest_RequestTrailers:
		return x.requestTrailers()
	case *extproc.ProcessingRequest_ResponseHeaders:
		return x.stream.Send(&extproc.ProcessingResponse{
			Response: &extproc.ProcessingResponse_ResponseHeaders{
				ResponseHeaders: &extproc.HeadersResponse{},
			},
		})
	case *extproc.ProcessingRequest_ResponseBody:
		return x.responseBody(part.ResponseBody)
	case *extproc.ProcessingRequest_ResponseTrailers:
		return x.stream.Send(&extproc.ProcessingResponse{
			Response: &extproc.ProcessingResponse_ResponseTrailers{
				ResponseTrailers: &extproc.TrailersResponse{},
			},
		})
	}
	return errOutOfOrder
}

// bodyMode is how the request's body comes. Proxies that do not tell are configured for the protocol's
// own mode.
func (x *exchange) bodyMode() extproc.BodySendMode {
	if x.modes == nil {
		return extproc.BodySendMode_FULL_DUPLEX_STREAMED
	}
	return x.modes.GetRequestBodyMode()
}

func (x *exchange) isDuplex() bool {
	return x.bodyMode() == extproc.BodySendMode_FULL_DUPLEX_STREAMED
}

func (x *exchange) isBuffered() bool {
	mode := x.bodyMode()
	return mode == extproc.BodySendMode_BUFFERED || mode == extproc.BodySendMode_BUFFERED_PARTIAL
}

func (x *exchange) requestHeaders(
	headers *extproc.HttpHeaders, metadata *extproc.Metadata,
) error {
	if x.request != nil {
		return errOutOfOrder
	}
	x.readHeaders(headers)
	x.allowed = allowedBy(metadata)
	path := x.request.URL.Path
	isAsked := x.picker.config.Contract.IsAdmitted(x.request.Method, path)
	waits := isAsked && !headers.GetEndOfStream() && (x.isDuplex() || x.isBuffered())
	if waits && !isJSON(x.request.Header) {
		waits = false // its model is not looked for
	}
	if !waits {
		return x.pick(isAsked, x.headersResponse)
	}
	if x.isBuffered() {
		// The body comes after this answer, and the endpoint is told with the body's.
		return x.headersResponse(nil)
	}
	return nil
}

// readHeaders makes a request of the headers, as far as they are those of one.
func (x *exchange) readHeaders(headers *extproc.HttpHeaders) {
	r := &http.Request{Method: http.MethodGet, URL: &url.URL{}, Header: http.Header{}}
	for _, one := range headers.GetHeaders().GetHeaders() {
		value := one.GetValue()
		if value == "" {
			value = string(one.GetRawValue())
		}
		switch one.GetKey() {
		case ":method":
			r.Method = value
		case ":path":
			r.URL.Path, _, _ = strings.Cut(value, "?")
		case ":authority":
			r.Host = value
		default:
			r.Header.Add(one.GetKey(), value)
		}
	}
	info := reqinfo.New(r.Header.Get("X-Request-Id"))
	r.Header.Set("X-Request-Id", info.ID)
	x.ctx = x.picker.config.Contract.WithShape(x.ctx, r.URL.Path, info.ID)
	x.request = r
}

func isJSON(header http.Header) bool {
	kind := header.Get("Content-Type")
	return kind == "" || strings.Contains(strings.ToLower(kind), "json")
}

// allowedBy reads the addresses that may be picked; nil: all.
func allowedBy(metadata *extproc.Metadata) []string {
	value, ok := metadata.GetFilterMetadata()[subsetSpace].GetFields()[subset]
	if !ok {
		return nil
	}
	allowed := []string{}
	add := func(text string) {
		for _, address := range strings.Split(text, ",") {
			allowed = append(allowed, strings.TrimSpace(address))
		}
	}
	add(value.GetStringValue())
	for _, one := range value.GetListValue().GetValues() {
		add(one.GetStringValue())
	}
	return allowed
}

func (x *exchange) requestBody(body *extproc.HttpBody) error {
	switch {
	case x.request == nil:
		return errOutOfOrder
	case x.picked && x.isDuplex():
		return x.passOn(body.GetBody(), body.GetEndOfStream())
	case x.picked:
		return x.bodyResponse(nil)
	}
	piece := body.GetBody()
	x.finder.take(piece)
	if x.isBuffered() {
		if int64(len(piece)) > x.picker.config.MaxBodyBytes {
			return x.refuse(x.picker.tooLarge(), "too_large")
		}
		return x.pick(true, x.bodyResponse)
	}
	switch {
	case x.taken+int64(len(piece)) > x.picker.config.MaxBodyBytes && !x.finder.found:
		return x.refuse(x.picker.tooLarge(), "too_large")
	case !x.picker.room.Take(int64(len(piece))):
		return x.refuse(noRoom(), "no_room")
	}
	x.taken += int64(len(piece))
	x.held = append(x.held, piece)
	if !x.finder.found && !body.GetEndOfStream() {
		return nil
	}
	if err := x.pick(true, x.headersResponse); err != nil {
		return err
	}
	return x.passHeld(body.GetEndOfStream())
}

func (x *exchange) requestTrailers() error {
	if x.request == nil {
		return errOutOfOrder
	}
	respond := func(told *structpb.Struct) error {
		return x.stream.Send(&extproc.ProcessingResponse{
			Response: &extproc.ProcessingResponse_RequestTrailers{
				RequestTrailers: &extproc.TrailersResponse{},
			},
			DynamicMetadata: told,
		})
	}
	switch {
	case x.picked:
	case x.isDuplex(): // the body ends here
		if err := x.pick(true, x.headersResponse); err != nil {
			return err
		}
		if err := x.passHeld(false); err != nil {
			return err
		}
	default: // a request without a body; its headers can only be changed by metadata now
		return x.pick(true, func(common *extproc.CommonResponse) error {
			return respond(metadataOf(common))
		})
	}
	return respond(nil)
}

func (x *exchange) responseBody(body *extproc.HttpBody) error {
	if x.modes == nil || x.modes.GetResponseBodyMode() ==
		extproc.BodySendMode_FULL_DUPLEX_STREAMED {
		return eachPiece(body.GetBody(), body.GetEndOfStream(), func(piece *extproc.BodyResponse) error {
			return x.stream.Send(&extproc.ProcessingResponse{
				Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: piece},
			})
		})
	}
	return x.stream.Send(&extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: &extproc.BodyResponse{}},
	})
}

// pick asks the gateways, if `isAsked`, chooses an endpoint and tells it by `respond`, or refuses.
func (x *exchange) pick(isAsked bool, respond func(*extproc.CommonResponse) error) error {
	if isAsked {
		if failure := x.picker.refusal(x.ctx, x.request, x.finder.model); failure != nil {
			return x.refuse(*failure, outcomes[failure.Status])
		}
	}
	picked, release := x.picker.endpoints.pick(x.allowed)
	if len(picked) == 0 {
		return x.refuse(none(), "not_ready")
	}
	x.picked, x.release = true, release
	x.picker.config.Metrics.picks.WithLabelValues("picked").Inc()
	return respond(&extproc.CommonResponse{
		HeaderMutation: &extproc.HeaderMutation{SetHeaders: []*extproc.HeaderValueOption{
			setHeader(destination, strings.Join(picked, ",")),
		}},
		ClearRouteCache: true,
	})
}

func (x *exchange) refuse(failure apierror.Error, outcome string) error {
	x.picker.config.Metrics.picks.WithLabelValues(outcome).Inc()
	if err := x.stream.Send(immediate(failure.For(x.ctx))); err != nil {
		return err
	}
	return errAnswered
}

func (x *exchange) headersResponse(common *extproc.CommonResponse) error {
	return x.stream.Send(&extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extproc.HeadersResponse{Response: common},
		},
		DynamicMetadata: metadataOf(common),
	})
}

func (x *exchange) bodyResponse(common *extproc.CommonResponse) error {
	return x.stream.Send(&extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_RequestBody{
			RequestBody: &extproc.BodyResponse{Response: common},
		},
		DynamicMetadata: metadataOf(common),
	})
}

// metadataOf has the destination that a response sets as a header.
func metadataOf(common *extproc.CommonResponse) *structpb.Struct {
	for _, option := range common.GetHeaderMutation().GetSetHeaders() {
		if option.GetHeader().GetKey() == destination {
			value := structpb.NewStringValue(string(option.GetHeader().GetRawValue()))
			return &structpb.Struct{Fields: map[string]*structpb.Value{
				destinationSpace: structpb.NewStructValue(&structpb.Struct{
					Fields: map[string]*structpb.Value{destination: value},
				}),
			}}
		}
	}
	return nil
}

// passHeld passes the pieces on that have come before the pick.
func (x *exchange) passHeld(end bool) error {
	defer x.drop()
	for i, piece := range x.held {
		if err := x.passOn(piece, end && i == len(x.held)-1); err != nil {
			return err
		}
	}
	return nil
}

// drop gives the room of held pieces back.
func (x *exchange) drop() {
	x.picker.room.Give(x.taken)
	x.held, x.taken = nil, 0
}

func (x *exchange) passOn(data []byte, end bool) error {
	return eachPiece(data, end, func(piece *extproc.BodyResponse) error {
		return x.stream.Send(&extproc.ProcessingResponse{
			Response: &extproc.ProcessingResponse_RequestBody{RequestBody: piece},
		})
	})
}

// eachPiece sends a piece of a body as pieces that every proxy takes.
func eachPiece(data []byte, end bool, send func(*extproc.BodyResponse) error) error {
	for {
		count := min(len(data), maxPieceBytes)
		piece, rest := data[:count], data[count:]
		err := send(&extproc.BodyResponse{Response: &extproc.CommonResponse{
			BodyMutation: &extproc.BodyMutation{
				StreamedResponse: &extproc.StreamedBodyResponse{
					Body: piece, EndOfStream: end && len(rest) == 0,
				},
			},
		}})
		if err != nil || len(rest) == 0 {
			return err
		}
		data = rest
	}
}
