package picker

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// Names are resolved this often.
	resolveInterval = 10 * time.Second
	// Endpoints are asked this often whether they are ready, and have this long to say so.
	probeInterval = 2 * time.Second
	probeTimeout  = 5 * time.Second
	// The picked endpoint and those that a proxy may try after it.
	maxPicked = 3
)

// endpoint is one REST edge. The list's mutex guards it.
type endpoint struct {
	address string // ip:port
	ready   bool
	open    int    // requests that were sent here and whose streams are open
	last    uint64 // number of the last pick, which orders endpoints that have as many
	stop    context.CancelFunc
}

// endpoints are the REST edges that requests may be sent to.
type endpoints struct {
	targets []string // host:port
	lookup  func(ctx context.Context, host string) ([]string, error)
	probe   func(ctx context.Context, address string) error
	every   time.Duration // between probes
	logger  *slog.Logger
	synced  chan struct{} // closed once each that was found first has been asked

	mutex sync.Mutex
	all   map[string]*endpoint
	picks uint64
}

func newEndpoints(targets []string, overTLS bool, logger *slog.Logger) *endpoints {
	return &endpoints{
		targets: targets,
		lookup:  net.DefaultResolver.LookupHost,
		probe:   prober(overTLS),
		every:   probeInterval,
		logger:  logger,
		synced:  make(chan struct{}),
		all:     map[string]*endpoint{},
	}
}

// prober asks an edge whether it is ready. Its certificate is not checked, as kubelets do not: it
// names no addresses of pods, nothing secret is sent, and proxies check those that they send
// requests to themselves.
func prober(overTLS bool) func(context.Context, string) error {
	scheme := "http"
	if overTLS {
		scheme = "https"
	}
	client := &http.Client{
		Timeout: probeTimeout,
		Transport: &http.Transport{
			TLSClientConfig:     &tls.Config{InsecureSkipVerify: true},
			MaxIdleConnsPerHost: 1,
			IdleConnTimeout:     4 * probeInterval,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context, address string) error {
		request, err := http.NewRequestWithContext(
			ctx, http.MethodGet, scheme+"://"+address+"/readyz", nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	}
}

// follow finds and probes endpoints until ctx ends.
func (e *endpoints) follow(ctx context.Context) {
	var first sync.WaitGroup
	e.resolve(ctx, &first)
	go func() {
		first.Wait()
		close(e.synced)
	}()
	ticker := time.NewTicker(resolveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			e.resolve(ctx, nil)
		}
	}
}

// resolve looks all names up. Where that fails, the addresses that were found before stay.
func (e *endpoints) resolve(ctx context.Context, first *sync.WaitGroup) {
	found := map[string]bool{}
	for _, target := range e.targets {
		host, port, _ := net.SplitHostPort(target)
		addresses, err := e.lookup(ctx, host)
		var failure *net.DNSError
		if err != nil && !(errors.As(err, &failure) && failure.IsNotFound) {
			e.logger.Warn("endpoints were not looked up", "host", host, "cause", err.Error())
			return
		}
		for _, address := range addresses {
			found[canonical(net.JoinHostPort(address, port))] = true
		}
	}
	e.mutex.Lock()
	defer e.mutex.Unlock()
	for address, one := range e.all {
		if !found[address] {
			one.stop()
			delete(e.all, address)
		}
	}
	for address := range found {
		if e.all[address] != nil {
			continue
		}
		watched, stop := context.WithCancel(ctx)
		e.all[address] = &endpoint{address: address, stop: stop}
		asked := func() {}
		if first != nil {
			first.Add(1)
			asked = sync.OnceFunc(first.Done)
		}
		go e.watch(watched, e.all[address], asked)
	}
}

// watch asks an endpoint again and again; `asked` is called after the first time.
func (e *endpoints) watch(ctx context.Context, one *endpoint, asked func()) {
	defer asked()
	ticker := time.NewTicker(e.every)
	defer ticker.Stop()
	for {
		err := e.probe(ctx, one.address)
		if ctx.Err() != nil {
			return
		}
		e.mutex.Lock()
		changed := one.ready != (err == nil)
		one.ready = err == nil
		e.mutex.Unlock()
		asked()
		switch {
		case changed && err == nil:
			e.logger.Info("endpoint is ready", "endpoint", one.address)
		case changed:
			e.logger.Warn("endpoint is not ready", "endpoint", one.address, "cause", err.Error())
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// pick chooses the ready endpoint with the fewest requests, and those that come after it, best first;
// empty: none is ready. `subset` has the addresses, with or without ports, that may be chosen; nil:
// all. The caller ends the request by `release`.
func (e *endpoints) pick(subset []string) (picked []string, release func()) {
	allowed := map[string]bool{}
	for _, address := range subset {
		allowed[canonical(address)] = true
	}
	e.mutex.Lock()
	defer e.mutex.Unlock()
	var ready []*endpoint
	for _, one := range e.all {
		host, _, _ := net.SplitHostPort(one.address)
		if one.ready && (subset == nil || allowed[one.address] || allowed[host]) {
			ready = append(ready, one)
		}
	}
	if len(ready) == 0 {
		return nil, func() {}
	}
	slices.SortFunc(ready, compare)
	for _, one := range ready[:min(maxPicked, len(ready))] {
		picked = append(picked, one.address)
	}
	best := ready[0]
	e.picks++
	best.open, best.last = best.open+1, e.picks
	return picked, sync.OnceFunc(func() {
		e.mutex.Lock()
		defer e.mutex.Unlock()
		best.open--
	})
}

func compare(a, b *endpoint) int {
	return cmp.Or(cmp.Compare(a.open, b.open), cmp.Compare(a.last, b.last))
}

// numReady is the number of endpoints that may be picked.
func (e *endpoints) numReady() int {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	count := 0
	for _, one := range e.all {
		if one.ready {
			count++
		}
	}
	return count
}

// canonical is the one way in which an address is written.
func canonical(address string) string {
	if both, err := netip.ParseAddrPort(address); err == nil {
		return netip.AddrPortFrom(both.Addr().Unmap(), both.Port()).String()
	}
	if alone, err := netip.ParseAddr(address); err == nil {
		return alone.Unmap().String()
	}
	return address
}
