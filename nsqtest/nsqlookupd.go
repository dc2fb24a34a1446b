package nsqtest

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/nsqio/nsq/nsqlookupd"
)

// NSQLookupdOptions says how an nsqlookupd differs from the usual. The zero value of a field leaves nsqlookupd's default in place.
type NSQLookupdOptions struct {
	TCPAddress  string // "host:port" for nsqds; default a free port of 127.0.0.1
	HTTPAddress string // "host:port" for consumers; default a free port of 127.0.0.1

	InactiveProducerTimeout time.Duration // an nsqd silent for longer isn't listed; nsqd pings every 15s; default 300s
	TombstoneLifetime       time.Duration // how long a tombstone hides an nsqd; default 45s

	// Logf gets the log line by line. Default nil: no log. It isn't called once nsqlookupd has stopped.
	Logf func(format string, args ...any)
}

func (o *NSQLookupdOptions) build() *nsqlookupd.Options {
	opts := nsqlookupd.NewOptions()
	opts.TCPAddress = behindRelay
	opts.HTTPAddress = behindRelay
	opts.BroadcastAddress = "127.0.0.1"
	set(&opts.InactiveProducerTimeout, o.InactiveProducerTimeout)
	set(&opts.TombstoneLifetime, o.TombstoneLifetime)
	return opts
}

// NSQLookupd is an nsqlookupd inside this process. Its methods may be called from several goroutines, but Restart only from
// one at a time. Those that ask something wait for an answer for up to 10s; what nsqlookupd refuses is a *[StatusError].
type NSQLookupd struct {
	opts    NSQLookupdOptions // with the addresses in use
	tcpAddr string
	api     api

	mu     sync.Mutex // guards the fields below
	run    *run       // the current or last run
	closed bool
}

// StartNSQLookupd starts an nsqlookupd that is stopped when the test ends; a failure ends the test. At most one
// NSQLookupdOptions may be given.
func StartNSQLookupd(tb TB, opts ...NSQLookupdOptions) *NSQLookupd {
	tb.Helper()
	l, err := NewNSQLookupd(optional(opts))
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	closeAfter(tb, "nsqlookupd", l.Close)
	return l
}

// NewNSQLookupd starts an nsqlookupd, which runs until Stop or Close.
func NewNSQLookupd(opts NSQLookupdOptions) (*NSQLookupd, error) {
	var err error
	if opts.TCPAddress, err = addrOr(opts.TCPAddress); err != nil {
		return nil, err
	}
	if opts.HTTPAddress, err = addrOr(opts.HTTPAddress); err != nil {
		return nil, err
	}
	l := &NSQLookupd{opts: opts}
	if err := l.start(); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *NSQLookupd) start() error {
	var r *run
	err := startOn([]string{l.opts.TCPAddress, l.opts.HTTPAddress}, func() (err error) {
		r, err = l.open()
		return err
	})
	if err != nil {
		return fmt.Errorf("nsqtest: starting nsqlookupd: %w", err)
	}
	l.mu.Lock()
	l.run = r
	l.mu.Unlock()
	// Until it answers, Exit could overtake the goroutines that Main starts.
	if err := l.api.ping(); err != nil {
		return errors.Join(err, l.Stop())
	}
	return nil
}

// open starts one run. Both addresses are relays: nsqlookupd doesn't end while it has a connection, and overlooks one that comes as it stops.
func (l *NSQLookupd) open() (*run, error) {
	opts := l.opts.build()
	log := newLogSink(l.opts.Logf)
	opts.Logger = log
	daemon, err := nsqlookupd.New(opts)
	if err != nil {
		return nil, err
	}
	tcp, err := newProxy(l.opts.TCPAddress, daemon.RealTCPAddr().String())
	if err != nil {
		daemon.Exit()
		return nil, err
	}
	http, err := newProxy(l.opts.HTTPAddress, daemon.RealHTTPAddr().String())
	if err != nil {
		tcp.Close()
		daemon.Exit()
		return nil, err
	}
	if l.tcpAddr == "" { // later starts have the same addresses, and others may be reading them
		l.tcpAddr = tcp.Addr()
		l.api = newAPI(http.Addr())
	}
	return startRun(daemon, []*Proxy{tcp, http}, log), nil
}

// TCPAddr returns the "host:port" that nsqds register at, see [NSQDOptions].LookupdTCPAddresses. It stays the same over restarts.
func (l *NSQLookupd) TCPAddr() string { return l.tcpAddr }

// HTTPAddr returns the "host:port" that consumers ask. It stays the same over restarts.
func (l *NSQLookupd) HTTPAddr() string { return l.api.addr }

// Stop ends nsqlookupd and waits for it for up to 10s. It forgets all it knows. On a stopped nsqlookupd it does nothing.
func (l *NSQLookupd) Stop() error {
	l.mu.Lock()
	r := l.run
	l.mu.Unlock()
	defer l.api.disconnect()
	return r.stop(stopTimeout)
}

// Restart starts nsqlookupd again, with the same addresses and options. It stops it before, if it runs. An nsqd registers again
// with its ping after 15s to 30s, or when told to by [Node.Announce].
func (l *NSQLookupd) Restart() error {
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if err := l.Stop(); err != nil {
		return err
	}
	return l.start()
}

// Close stops nsqlookupd for good. It may be called twice.
func (l *NSQLookupd) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	return l.Stop()
}

// LookupResult is who serves a topic, and its channels.
type LookupResult struct {
	Channels  []string   `json:"channels"`
	Producers []Producer `json:"producers"`
}

// Producer is an nsqd as nsqlookupd lists it.
type Producer struct {
	RemoteAddress    string   `json:"remote_address"` // where nsqlookupd sees it; nothing to connect to
	Hostname         string   `json:"hostname"`
	BroadcastAddress string   `json:"broadcast_address"`
	TCPPort          int      `json:"tcp_port"`
	HTTPPort         int      `json:"http_port"`
	Version          string   `json:"version"`
	Topics           []string `json:"topics"`     // from Nodes only
	Tombstones       []bool   `json:"tombstones"` // from Nodes only; one for each of Topics
}

// TCPAddr returns the "host:port" that consumers connect to.
func (p Producer) TCPAddr() string {
	return net.JoinHostPort(p.BroadcastAddress, strconv.Itoa(p.TCPPort))
}

// HTTPAddr returns the "host:port" of the HTTP interface, which is what [NSQLookupd.Tombstone] wants.
func (p Producer) HTTPAddr() string {
	return net.JoinHostPort(p.BroadcastAddress, strconv.Itoa(p.HTTPPort))
}

// Lookup returns who serves a topic, as a consumer is told. The error is an [ErrNotFound] if the topic is unknown.
func (l *NSQLookupd) Lookup(topic string) (LookupResult, error) {
	var result LookupResult
	err := l.api.get("/lookup", topicQuery(topic), &result)
	return result, err
}

// Nodes returns all nsqds that are registered, those with tombstones too.
func (l *NSQLookupd) Nodes() ([]Producer, error) {
	var result LookupResult
	err := l.api.get("/nodes", nil, &result)
	return result.Producers, err
}

// CreateTopic makes a topic known that no nsqd serves.
func (l *NSQLookupd) CreateTopic(topic string) error {
	return l.api.post("/topic/create", topicQuery(topic), nil)
}

// DeleteTopic makes nsqlookupd forget a topic. The nsqds that have it are not told.
func (l *NSQLookupd) DeleteTopic(topic string) error {
	return l.api.post("/topic/delete", topicQuery(topic), nil)
}

// Tombstone hides an nsqd, named by the HTTP address that it is listed with, from lookups of a topic for TombstoneLifetime. An
// unknown topic or nsqd is no error.
func (l *NSQLookupd) Tombstone(topic, nsqdHTTPAddr string) error {
	query := url.Values{"topic": {topic}, "node": {nsqdHTTPAddr}}
	return l.api.post("/topic/tombstone", query, nil)
}
