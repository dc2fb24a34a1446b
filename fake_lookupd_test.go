package nsq

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// fakeLookupds is the HTTP side of a set of nsqlookupds, without a network: an http.RoundTripper for use in synctest
// bubbles. Give its client to SetLookupdHttpClient.
type fakeLookupds struct {
	t testing.TB

	mu       sync.Mutex // guards the fields below, and the fakes
	servers  map[string]*fakeLookupd
	requests []fakeLookupRequest
	changed  chan struct{} // closed and replaced at each request
}

// fakeLookupRequest is a request as it came.
type fakeLookupRequest struct {
	At     time.Time
	Host   string
	URL    string
	Header http.Header
}

// fakeLookupd is one nsqlookupd. Answers can be changed at any time; they hold for requests to come.
type fakeLookupd struct {
	all  *fakeLookupds
	addr string

	// guarded by all.mu
	answer func(ctx context.Context) (*http.Response, error)
	delay  time.Duration // before the answer
	old    bool          // the envelope of servers before 1.0
}

// newFakeLookupds returns nsqlookupds that know of no topic yet.
func newFakeLookupds(t testing.TB, addrs ...string) *fakeLookupds {
	f := &fakeLookupds{t: t, servers: make(map[string]*fakeLookupd), changed: make(chan struct{})}
	for _, addr := range addrs {
		l := &fakeLookupd{all: f, addr: addr}
		f.servers[addr] = l
		l.notFound()
	}
	return f
}

func (f *fakeLookupds) client() *http.Client { return &http.Client{Transport: f} }

// at returns the nsqlookupd at addr.
func (f *fakeLookupds) at(addr string) *fakeLookupd { return f.servers[addr] }

// RoundTrip implements http.RoundTripper. Hosts that were not added refuse connections.
func (f *fakeLookupds) RoundTrip(req *http.Request) (*http.Response, error) {
	f.mu.Lock()
	f.requests = append(f.requests, fakeLookupRequest{time.Now(), req.URL.Host, req.URL.String(), req.Header.Clone()})
	close(f.changed)
	f.changed = make(chan struct{})
	l := f.servers[req.URL.Host]
	if l == nil {
		f.mu.Unlock()
		return nil, fakeDialError("tcp", req.URL.Host, syscall.ECONNREFUSED)
	}
	answer, delay := l.answer, l.delay
	f.mu.Unlock()
	if delay > 0 {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	return answer(req.Context())
}

// asked returns the requests that came to the host, or to all with "".
func (f *fakeLookupds) asked(addr string) (found []fakeLookupRequest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.requests {
		if addr == "" || r.Host == addr {
			found = append(found, r)
		}
	}
	return found
}

// respond sets what becomes of a request.
func (l *fakeLookupd) respond(answer func(ctx context.Context) (*http.Response, error)) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.answer = answer
}

// respondWith answers with a status and a body.
func (l *fakeLookupd) respondWith(status int, body string) {
	l.respond(func(context.Context) (*http.Response, error) {
		return fakeHTTP(status, strings.NewReader(body)), nil
	})
}

func fakeHTTP(status int, body io.Reader) *http.Response {
	return &http.Response{
		Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), StatusCode: status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: io.NopCloser(body), ContentLength: -1,
	}
}

// list has the nsqlookupd list these nsqds, by their addresses.
func (l *fakeLookupd) list(nsqds ...string) {
	producers := []map[string]any{}
	for _, addr := range nsqds {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			panic(err)
		}
		number, _ := strconv.Atoi(port)
		producers = append(producers, map[string]any{
			"remote_address": "192.0.2.1:51234", "hostname": "not-this-one", "broadcast_address": host,
			"tcp_port": number, "http_port": number + 1, "version": "1.3.0",
		})
	}
	doc := map[string]any{"channels": []string{"c"}, "producers": producers}
	l.all.mu.Lock()
	old := l.old
	l.all.mu.Unlock()
	if old {
		doc = map[string]any{"status_code": 200, "status_txt": "OK", "data": doc}
	}
	body, err := json.Marshal(doc)
	if err != nil {
		panic(err)
	}
	l.respondWith(http.StatusOK, string(body))
}

// notFound is the answer before the first message of a topic is published.
func (l *fakeLookupd) notFound() { l.respondWith(http.StatusNotFound, `{"message":"TOPIC_NOT_FOUND"}`) }

// broken answers with a page of a web server.
func (l *fakeLookupd) broken() {
	l.respondWith(http.StatusInternalServerError, "Internal Server Error")
}

// garbage answers with something that is no JSON.
func (l *fakeLookupd) garbage() { l.respondWith(http.StatusOK, `{"producers":[{"broadcast_`) }

// empty answers with no body at all.
func (l *fakeLookupd) empty() { l.respondWith(http.StatusOK, "") }

// endless answers with a body that has no end.
func (l *fakeLookupd) endless() {
	l.respond(func(context.Context) (*http.Response, error) { return fakeHTTP(http.StatusOK, fakeEndless{}), nil })
}

type fakeEndless struct{}

func (fakeEndless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '['
	}
	return len(p), nil
}

// refused: nobody listens.
func (l *fakeLookupd) refused() {
	l.respond(func(context.Context) (*http.Response, error) {
		return nil, fakeDialError("tcp", l.addr, syscall.ECONNREFUSED)
	})
}

// hangs: a black hole, until the request is given up.
func (l *fakeLookupd) hangs() {
	l.respond(func(ctx context.Context) (*http.Response, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
}

// slow delays each answer.
func (l *fakeLookupd) slow(d time.Duration) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.delay = d
}

// oldEnvelope has list answer in the form of servers before 1.0, from the next call on.
func (l *fakeLookupd) oldEnvelope() {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.old = true
}

// newDiscoveringConsumer returns a silent consumer of topic "t" and channel "c", with a handler that finishes all, that
// asks the fake nsqlookupds and dials the cluster. It is stopped when the bubble ends.
func newDiscoveringConsumer(t *testing.T, cluster *fakeCluster, lookupds *fakeLookupds, tune func(cfg *Config)) *Consumer {
	t.Helper()
	r := newTestConsumer(t, cluster, func(cfg *Config) {
		cfg.LookupdPollJitter = 0
		cfg.MaxInFlight = 100 // or RDY would move all the time
		if tune != nil {
			tune(cfg)
		}
	})
	r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
	r.SetLookupdHttpClient(lookupds.client())
	t.Cleanup(func() { stopConsumer(t, r, time.Minute) })
	return r
}

// gaps returns the times between requests.
func fakeLookupGaps(requests []fakeLookupRequest) (gaps []time.Duration) {
	for i := 1; i < len(requests); i++ {
		gaps = append(gaps, requests[i].At.Sub(requests[i-1].At))
	}
	return gaps
}

// nsqdsConnected are the addresses of the nsqds that are connected, sorted.
func nsqdsConnected(r *Consumer) []string {
	addrs := []string{}
	for _, n := range r.Status().NSQDs {
		if n.State == NodeConnected {
			addrs = append(addrs, n.Address)
		}
	}
	slices.Sort(addrs)
	return addrs
}
