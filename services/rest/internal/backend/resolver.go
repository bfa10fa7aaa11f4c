package backend

import (
	"net/url"
	"sync"
	"time"

	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/dns"
)

const (
	scheme = "weft-gateways"
	// Names are resolved this often, so that new gateways get calls although no connection to another
	// one has ended.
	refreshInterval = 10 * time.Second
)

func init() {
	// It is below refreshInterval, or every second lookup would be delayed.
	dns.SetMinResolutionInterval(refreshInterval / 2)
}

// builder makes one resolver of many: each target's addresses are what `single` finds.
type builder struct {
	targets []string
	single  resolver.Builder // of one target
	refresh time.Duration
}

// Scheme implements resolver.Builder.
func (*builder) Scheme() string {
	return scheme
}

// OverrideAuthority implements resolver.AuthorityOverrider; without TLS it is all that names us.
func (b *builder) OverrideAuthority(resolver.Target) string {
	return b.targets[0]
}

// Build implements resolver.Builder.
func (b *builder) Build(
	_ resolver.Target, parent resolver.ClientConn, options resolver.BuildOptions,
) (resolver.Resolver, error) {
	all := &union{found: make([][]resolver.Endpoint, len(b.targets)), parent: parent}
	names := &names{stop: make(chan struct{})}
	for i, target := range b.targets {
		one := resolver.Target{URL: url.URL{Scheme: "dns", Path: "/" + target}}
		child, err := b.single.Build(one, part{parent, all, i}, options)
		if err != nil {
			names.Close()
			return nil, err
		}
		names.children = append(names.children, child)
	}
	go names.refresh(b.refresh)
	return names, nil
}

// names are the resolvers of all targets.
type names struct {
	children []resolver.Resolver
	stop     chan struct{}
}

func (n *names) refresh(every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-ticker.C:
			n.ResolveNow(resolver.ResolveNowOptions{})
		}
	}
}

// ResolveNow implements resolver.Resolver.
func (n *names) ResolveNow(options resolver.ResolveNowOptions) {
	for _, child := range n.children {
		child.ResolveNow(options)
	}
}

// Close implements resolver.Resolver.
func (n *names) Close() {
	close(n.stop)
	for _, child := range n.children {
		child.Close()
	}
}

// union is what all targets have been resolved to.
type union struct {
	parent resolver.ClientConn

	mutex sync.Mutex
	found [][]resolver.Endpoint // by target
}

func (u *union) set(i int, endpoints []resolver.Endpoint) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	u.found[i] = endpoints
	var state resolver.State
	for _, found := range u.found {
		for _, endpoint := range found {
			state.Endpoints = append(state.Endpoints, endpoint)
			state.Addresses = append(state.Addresses, endpoint.Addresses...)
		}
	}
	_ = u.parent.UpdateState(state)
}

// fail reports a failed lookup only while no other target has gateways; found gateways stay.
func (u *union) fail(err error) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	for _, found := range u.found {
		if len(found) > 0 {
			return
		}
	}
	u.parent.ReportError(err)
}

// part is what one target's resolver reports to.
type part struct {
	resolver.ClientConn
	all   *union
	index int
}

// UpdateState implements resolver.ClientConn.
func (p part) UpdateState(state resolver.State) error {
	p.all.set(p.index, state.Endpoints)
	// A name without addresses is no error here, or DNS would be asked less and less often, up to
	// minutes.
	return nil
}

// ReportError implements resolver.ClientConn.
func (p part) ReportError(err error) {
	p.all.fail(err)
}
