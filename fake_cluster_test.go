package nsq

import (
	"context"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// fakeReach says what becomes of a dial to a fake nsqd.
type fakeReach int

const (
	reachUp      fakeReach = iota // connections are accepted and served
	reachRefused                  // dials fail at once
	reachHangs                    // dials last until their context ends
	reachSilent                   // connections are accepted, but nobody reads or writes at the other end
)

// fakeCluster is a set of fake nsqds with one log. Give its Dial to Config.Dial.
type fakeCluster struct {
	fakeLog

	closed chan struct{}
	wg     sync.WaitGroup // goroutines of all connections and listeners

	// guarded by fakeLog.mu
	nsqds       map[string]*fakeNSQD
	conns       int        // connections ever accepted
	parked      []net.Conn // accepted by nsqds that are reachSilent
	inFlight    int
	maxInFlight int // the most messages that were ever in flight in the whole cluster at once
}

// newFakeCluster returns a cluster of one fake nsqd per address, to be used from within the synctest bubble or the test
// that it was made in. It is closed at the test's end, and shows the end of its log if the test has failed.
func newFakeCluster(t testing.TB, addrs ...string) *fakeCluster {
	c := &fakeCluster{
		fakeLog: fakeLog{t: t, patience: time.Hour, changed: make(chan struct{})}, // an hour of the bubble's clock
		closed:  make(chan struct{}),
		nsqds:   make(map[string]*fakeNSQD),
	}
	for _, addr := range addrs {
		c.add(addr)
	}
	t.Cleanup(func() {
		c.close()
		if t.Failed() {
			t.Logf("the log of the fake nsqds ends with\n%s", c.tail(100))
		}
	})
	return c
}

// newFakeNSQD returns a cluster's only nsqd, at nsqd-1:4150.
func newFakeNSQD(t testing.TB) *fakeNSQD {
	return newFakeCluster(t, "nsqd-1:4150").nsqd("nsqd-1:4150")
}

// listenFake returns a fake nsqd on a loopback TCP port, for tests outside of synctest bubbles.
func listenFake(t testing.TB) *fakeNSQD {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := newFakeCluster(t, listener.Addr().String())
	c.patience = 10 * time.Second // of real time
	n := c.nsqd(listener.Addr().String())
	c.wg.Go(func() {
		<-c.closed
		listener.Close()
	})
	c.wg.Go(func() { n.acceptLoop(listener) })
	return n
}

// acceptLoop serves the connections of a real listener until the cluster is closed.
func (n *fakeNSQD) acceptLoop(listener net.Listener) {
	for {
		nc, err := listener.Accept()
		if err != nil {
			return
		}
		n.accept(nc)
	}
}

// add puts another nsqd into the cluster.
func (c *fakeCluster) add(addr string) *fakeNSQD {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &fakeNSQD{
		cluster:   c,
		addr:      addr,
		behaviour: defaultFakeBehaviour(),
		reading:   make(chan struct{}),
		inFlight:  make(map[string]*fakeDelivery),
		finished:  make(map[string]bool),
		published: make(map[string][][]byte),
	}
	close(n.reading)
	c.nsqds[addr] = n
	return n
}

// nsqd returns the fake at addr.
func (c *fakeCluster) nsqd(addr string) *fakeNSQD {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nsqds[addr]
	if n == nil {
		panic("no fake nsqd at " + addr)
	}
	return n
}

// Dial has the signature of Config.Dial. It connects to the fake at addr through memory, as that fake's reach says.
func (c *fakeCluster) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	n, reach, delay := c.dialed(addr)
	switch {
	case n == nil:
		return nil, fakeDialError(network, addr, &net.DNSError{Err: "no such host", Name: addr, IsNotFound: true})
	case reach == reachRefused:
		return nil, fakeDialError(network, addr, syscall.ECONNREFUSED)
	case reach == reachHangs:
		return nil, fakeDialError(network, addr, c.hang(ctx, nil))
	}
	if delay > 0 {
		arrived := time.NewTimer(delay)
		defer arrived.Stop()
		if err := c.hang(ctx, arrived.C); err != nil {
			return nil, fakeDialError(network, addr, err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return nil, fakeDialError(network, addr, err)
	}
	client, server := newFakePipe(n.socketBuffer(), "client:50000", fakeAddr(addr))
	n.accept(server)
	return client, nil
}

func fakeDialError(network, addr string, err error) error {
	return &net.OpError{Op: "dial", Net: network, Addr: fakeAddr(addr), Err: err}
}

// dialed writes a dial down and returns who was dialled, and how that one is to be reached.
func (c *fakeCluster) dialed(addr string) (*fakeNSQD, fakeReach, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, entry := c.nsqds[addr], fakeEntry{NSQD: addr, Kind: entryDialed}
	if n == nil {
		entry.Line = "unknown host"
		c.appendLocked(entry)
		return nil, reachRefused, 0
	}
	n.dials = append(n.dials, time.Now())
	entry.Line = map[fakeReach]string{reachRefused: "refused", reachHangs: "hangs", reachSilent: "silent"}[n.reach]
	c.appendLocked(entry)
	return n, n.reach, n.behaviour.dialDelay
}

// hang waits until done, or returns the reason why it can't wait that long.
func (c *fakeCluster) hang(ctx context.Context, done <-chan time.Time) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.closed:
		return net.ErrClosed
	}
}

// accept starts serving nc, or leaves it alone for a nsqd that is reachSilent.
func (n *fakeNSQD) accept(nc net.Conn) {
	c := n.cluster
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case isFakeClosed(c.closed):
		nc.Close()
	case n.reach == reachSilent:
		c.parked = append(c.parked, nc)
	case n.reach == reachUp:
		n.serveLocked(nc)
	default: // taken down during the dial
		nc.Close()
	}
}

// setReach changes what becomes of later dials. Connections stay as they are.
func (n *fakeNSQD) setReach(reach fakeReach) {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	n.reach = reach
}

// down is a crash: dials are refused, and all connections are reset. What was in flight stays so until its timeout, and
// the queue survives, as it does for a nsqd that is cut off from the network.
func (n *fakeNSQD) down() {
	n.setReach(reachRefused)
	n.dropAll()
}

// up makes the nsqd accept connections again.
func (n *fakeNSQD) up() { n.setReach(reachUp) }

// dialTimes returns when the nsqd was dialled, whatever became of it.
func (n *fakeNSQD) dialTimes() []time.Time {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	return append([]time.Time(nil), n.dials...)
}

// later runs do with the lock held after d, unless the cluster is closed by then.
func (c *fakeCluster) later(d time.Duration, doLocked func()) *time.Timer {
	return time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !isFakeClosed(c.closed) {
			doLocked()
		}
	})
}

func isFakeClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// openConns counts the connections of the cluster that are open at the fakes' end.
func (c *fakeCluster) openConns() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	open := 0
	for _, n := range c.nsqds {
		open += len(n.conns)
	}
	return open
}

// unanswered returns how many messages are in flight now and how many were at most, over all nsqds.
func (c *fakeCluster) unanswered() (now, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inFlight, c.maxInFlight
}

// close ends all connections and returns when no goroutine of the cluster is left. It may be called more than once.
func (c *fakeCluster) close() {
	c.mu.Lock()
	if !isFakeClosed(c.closed) {
		close(c.closed)
	}
	for _, n := range c.nsqds {
		for len(n.conns) > 0 {
			n.conns[0].closeLocked("the test is over")
		}
	}
	for _, nc := range c.parked {
		nc.Close()
	}
	c.parked = nil
	c.mu.Unlock()
	c.wg.Wait()
}
