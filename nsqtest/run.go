package nsqtest

import (
	"errors"
	"sync"
	"time"
)

const (
	stopTimeout      = 10 * time.Second // how long a server may take to end
	childStopTimeout = 3 * time.Second  // the same in a process of its own, which then ends all the same
)

var errStopTimeout = errors.New("nsqtest: the server has not ended in time; is a connection open that has not sent anything yet?")

// server is what nsqd.NSQD and nsqlookupd.NSQLookupd have in common.
type server interface {
	Main() error
	Exit()
}

// run is one life of a server inside this process, from its start to its end. A restart makes another.
type run struct {
	server server
	relays []*Proxy
	log    *logSink
	once   sync.Once
	done   chan struct{} // closed when Main and Exit have returned
	main   chan error    // Main's result; size 1
}

func startRun(s server, relays []*Proxy, log *logSink) *run {
	r := &run{server: s, relays: relays, log: log, done: make(chan struct{}), main: make(chan error, 1)}
	go func() { r.main <- s.Main() }()
	return r
}

// stop ends the server and waits for it, no longer than patience. It may be called several times and at once.
func (r *run) stop(patience time.Duration) error {
	r.once.Do(func() { go r.exit() })
	defer r.log.close()

	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case <-r.done:
		return nil
	case <-timeout.C:
		return errStopTimeout
	}
}

func (r *run) exit() {
	closeAll(r.relays)
	r.server.Exit()
	<-r.main
	close(r.done)
}

// Relays are healthy proxies that stand for the end of a process. A server that runs inside another process leaves connections open when it
// ends: its HTTP connections, over which the stopped server still answers, and nsqd's to nsqlookupd, which keep it
// listed. Those go through relays, and are closed with them. Only nsqd's own TCP port has none: a relay would hide who is
// connected, and what tests of a client are about is how each byte and each close arrives.

// relayAll puts a relay before each target.
func relayAll(targets []string) (relays []*Proxy, addrs []string, err error) {
	for _, target := range targets {
		relay, err := NewProxy(target)
		if err != nil {
			closeAll(relays)
			return nil, nil, err
		}
		relays = append(relays, relay)
		addrs = append(addrs, relay.Addr())
	}
	return relays, addrs, nil
}

func closeAll(relays []*Proxy) {
	for _, relay := range relays {
		relay.Close()
	}
}

// behindRelay is where a server listens that is reached through a relay.
const behindRelay = "127.0.0.1:0"
