package nsq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// NodeState says how it stands with one nsqd.
type NodeState int

const (
	// NodeWaiting: not connected, the next try comes at NextTry.
	NodeWaiting NodeState = iota
	// NodeConnecting: being dialled, or in IDENTIFY, AUTH or SUB.
	NodeConnecting
	// NodeConnected: subscribed.
	NodeConnected
	// NodeFailed: the first connect of a direct address failed, and is not tried again by itself.
	NodeFailed
)

// String returns the name in lower case.
func (s NodeState) String() string {
	switch s {
	case NodeWaiting:
		return "waiting"
	case NodeConnecting:
		return "connecting"
	case NodeConnected:
		return "connected"
	case NodeFailed:
		return "failed"
	}
	return fmt.Sprintf("NodeState(%d)", int(s))
}

// node is one nsqd, by the address that was configured or discovered: who asked for it, the connection to it, and how
// often connecting failed. All but the first line is guarded by Consumer.mu.
//
// While serve runs, it alone moves the node on. For a direct address it runs from the first connect that succeeded
// until DisconnectFromNSQD or Stop. For a discovered one it makes one connection; whether there is a next one is for
// lookupdLoop to say, by a fresh answer that still lists the address.
type node struct {
	addr   string
	ctx    context.Context // ends with DisconnectFromNSQD and Stop
	cancel context.CancelCauseFunc

	direct     bool // asked for by ConnectToNSQD
	discovered bool // listed by an nsqlookupd
	serving    bool // serve runs

	conn          *Conn // nil while there is none
	connectedOnce bool
	state         NodeState
	since         time.Time
	lastErr       error
	failures      int           // connects that failed, or connections that died at once, in a row
	failing       time.Time     // when the first of them was over
	nextTry       time.Time     // of state NodeWaiting
	tried         *attempt      // the current connect, if somebody waits for it
	nudge         chan struct{} // size 1: try now
	gate          logGate       // of connects that fail again and again
	loud          bool          // the present connect is logged; written by serve
	unsaid        int           // connects before it that were not; written by serve
	lives         logGate       // of connections that are lost again and again
	shortLives    int           // connections in a row that ended within a second

	// Discovery, see lookupdLoop.
	missing      int       // good polls in a row that did not list it
	missingSince time.Time // the first of them
}

// attempt is a connect that somebody waits for.
type attempt struct {
	over chan struct{} // closed when it has succeeded or failed
	err  error         // set before; what becomes of the connection later is another matter
}

func (n *node) setState(s NodeState) { n.state, n.since = s, time.Now() }

// ConnectToNSQD connects to the nsqd at addr: host:port, or the path of a Unix socket. It blocks until nsqd has
// accepted the subscription: for Config.DialTimeout, and for Config.ReadTimeout for each step of the handshake, at most.
//
// If the first connect fails, its error is returned and the address is not tried again. Once connected, a connection
// that is lost is made again for ever, until DisconnectFromNSQD or Stop: at first within Config.ReconnectInterval, then
// with delays that grow to Config.MaxReconnectInterval.
//
// Errors, in this order: "consumer stopped"; "no handlers", or what was wrong with AddHandler; an *AddressError;
// ErrAlreadyConnected, also while connecting; those of dialling and Conn.Connect; a *ProtocolError for a refused SUB.
func (r *Consumer) ConnectToNSQD(addr string) error {
	r.mu.Lock()
	if err := r.readyLocked(); err != nil {
		r.mu.Unlock()
		return err
	}
	if _, _, err := parseNSQDAddress(addr); err != nil {
		r.mu.Unlock()
		return err
	}
	n := r.nodes[addr]
	if n != nil && (n.state == NodeConnected || n.state == NodeConnecting) {
		n.direct = true
		r.mu.Unlock()
		return ErrAlreadyConnected
	}
	r.startLocked()
	if n == nil {
		n = r.addNodeLocked(addr)
	}
	n.direct = true
	tried := r.tryLocked(n)
	r.mu.Unlock()

	<-tried.over // serve sees to it when the consumer stops or the node is dropped
	return tried.err
}

// ConnectToNSQDs connects to all the addresses, at the same time, and waits for them like ConnectToNSQD. A single error
// is returned as it is, several are joined.
func (r *Consumer) ConnectToNSQDs(addresses []string) error {
	r.mu.Lock()
	err := r.readyLocked()
	r.mu.Unlock()
	if err != nil && len(addresses) > 0 {
		return err // once, not for each
	}
	errs := make([]error, len(addresses))
	var wg sync.WaitGroup
	for i, addr := range addresses {
		wg.Go(func() { errs[i] = r.ConnectToNSQD(addr) })
	}
	wg.Wait()
	return joinErrors(errs)
}

// joinErrors is errors.Join, but a single error stays itself, for those who compare.
func joinErrors(errs []error) error {
	var some []error
	for _, err := range errs {
		if err != nil {
			some = append(some, err)
		}
	}
	if len(some) == 1 {
		return some[0]
	}
	return errors.Join(some...)
}

// DisconnectFromNSQD forgets the address: a connection to it is closed gracefully in the background, tries to make one
// end. It returns ErrNotConnected for an address that is not in use. An nsqlookupd that lists the address brings it
// back with the next poll.
func (r *Consumer) DisconnectFromNSQD(addr string) error {
	r.mu.Lock()
	n := r.nodes[addr]
	if n == nil {
		r.mu.Unlock()
		return ErrNotConnected
	}
	c := r.dropLocked(n)
	r.mu.Unlock()
	if c != nil {
		r.closeConn(c)
	}
	return nil
}

// dropLocked forgets a node. The caller closes the connection that is returned.
func (r *Consumer) dropLocked(n *node) *Conn {
	delete(r.nodes, n.addr)
	n.direct, n.discovered = false, false
	n.cancel(ErrNotConnected)
	if n.conn != nil {
		r.leaving[n.conn] = true
	}
	return n.conn
}

func (r *Consumer) addNodeLocked(addr string) *node {
	n := &node{addr: addr, nudge: make(chan struct{}, 1), gate: logGate{burst: persistentFailures, interval: time.Minute}}
	n.lives = n.gate
	n.ctx, n.cancel = context.WithCancelCause(r.ctx)
	r.nodes[addr] = n
	return n
}

// tryLocked has a connect made now. The node is
// neither connected nor connecting.
func (r *Consumer) tryLocked(n *node) *attempt {
	n.setState(NodeConnecting)
	tried := &attempt{over: make(chan struct{})}
	n.tried = tried
	if n.serving { // between two connects
		select {
		case n.nudge <- struct{}{}:
		default:
		}
		return tried
	}
	n.serving = true
	r.serving.Go(func() { r.serve(n) })
	return tried
}

// serve connects to a node and reads from it, again and again.
func (r *Consumer) serve(n *node) {
	for {
		c, err := r.connect(n)
		if err == nil {
			err = r.serveConn(n, c)
		}
		delay, again := r.afterConn(n, c, err)
		if !again {
			return
		}
		n.pause(delay)
	}
}

// connect makes a connection, up to the accepted subscription. The connection is nil if that failed.
func (r *Consumer) connect(n *node) (*Conn, error) {
	r.mu.Lock()
	n.setState(NodeConnecting)
	select {
	case <-n.nudge: // this connect is what it asks for
	default:
	}
	n.loud, n.unsaid = n.gate.allow(time.Now())
	loud := n.loud
	r.mu.Unlock()

	c := newConn(n.addr, r.config, r, r.log.forConn(n.addr))
	if !loud {
		c.log.hush(math.MaxInt64)
	}
	err := r.reachApart(n, c)

	defer func() {
		if err != nil {
			c.end(nil)
			c.wg.Wait()
		}
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { n.endTry(err) }()
	if n.ctx.Err() != nil {
		// Dropped or stopped, be it in the last moment: nobody else knows of the connection, so nobody else would close it.
		err = context.Cause(n.ctx)
	}
	n.lastErr = err
	if err != nil {
		n.setState(NodeWaiting)
		if n.direct && !n.connectedOnce && !n.discovered { // not tried again: true before ConnectToNSQD returns
			n.setState(NodeFailed)
		}
		return nil, err
	}
	n.conn, n.connectedOnce = c, true
	n.setState(NodeConnected)
	c.log.hush(0)
	if ok, _ := n.lives.allow(time.Now()); !ok { // like those before it, it will hardly live for long
		c.log.hush(monotonic() + int64(n.lives.interval))
	}
	return c, nil
}

// reachApart is reach in a goroutine of its own, which takes with it the stack that a handshake needs. The one that then
// serves the connection would keep it: 8 KiB in place of 4, for each idle connection (TestAnIdleConnectionCostsLittle).
func (r *Consumer) reachApart(n *node, c *Conn) (err error) {
	err = errors.New("nsq: connecting ended its goroutine") // as a user's logger or TLS callback may
	over := make(chan struct{})
	go func() {
		defer close(over)
		err = r.reach(n, c)
	}()
	<-over
	return err
}

// reach dials a node and goes through the handshake and SUB.
func (r *Consumer) reach(n *node, c *Conn) error {
	c.log.logf(LogLevelInfo, "connecting to nsqd")
	if n.ctx.Err() != nil {
		return context.Cause(n.ctx)
	}
	if _, err := c.handshake(n.ctx); err != nil {
		return err
	}
	if err := c.subscribe(n.ctx, r.topic, r.channel); err != nil {
		return err
	}
	return c.begin()
}

// endTry tells those who wait for a connect how it went.
func (n *node) endTry(err error) {
	if n.tried != nil {
		n.tried.err = err
		close(n.tried.over)
		n.tried = nil
	}
}

// serveConn reads from a connection until it ends, and says why; nil after a close that was asked for.
func (r *Consumer) serveConn(n *node, c *Conn) error {
	if !n.loud { // "connecting to nsqd" was not said
		c.log.logf(LogLevelInfo, "connected again after %s", time.Since(n.failing).Round(time.Second))
	}
	r.tell(rdyEvent{kind: rdyUp, conn: c})
	err := c.readLoop()
	c.log.logf(LogLevelInfo, "readLoop exiting")
	c.wg.Wait()
	r.tell(rdyEvent{kind: rdyDown, conn: c})
	r.inbox.purge()

	r.mu.Lock()
	n.conn = nil
	n.lastErr = err
	n.setState(NodeWaiting)
	r.past.add(c.countsNow())
	delete(r.leaving, c)
	alive := 0
	for _, other := range r.nodes {
		if other.state == NodeConnected {
			alive++
		}
	}
	r.mu.Unlock()

	if err == nil {
		c.log.logf(LogLevelInfo, "clean close complete")
	} else {
		r.log.logf(c.log.damped(LogLevelWarning), "there are %d connections left alive", alive)
	}
	return err
}

// afterConn decides what comes after a connect that failed (c is nil then) or a connection that ended: another try, and
// when.
func (r *Consumer) afterConn(n *node, c *Conn, err error) (delay time.Duration, again bool) {
	var line connFailure
	defer func() { r.logFailure(n, line) }() // without the lock: a logger may call us
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.ctx.Err() != nil {
		n.serving = false
		n.endTry(context.Cause(n.ctx))
		return 0, false
	}
	if c != nil && n.wasUseful(c) {
		n.failures = 0
	}
	if n.failures++; n.failures == 1 {
		n.failing = time.Now()
	}
	delay = reconnectDelay(r.config, n.failures)
	n.nextTry = time.Now().Add(delay)
	line = n.failed(c, err, delay)
	switch {
	case n.tried != nil: // ConnectToNSQD came meanwhile, and waits
		return 0, true
	case n.direct && n.connectedOnce:
		return delay, true
	case n.discovered:
		n.serving = false
		r.lookups.wakeUp() // from memory alone it is not connected again
	default:
		n.serving = false
		n.setState(NodeFailed)
	}
	return 0, false
}

// From so many failures in so long a time on they are logged as errors: a restart of nsqd takes a few.
const (
	persistentFailures = 6
	persistentFailing  = 30 * time.Second
)

// connFailure is what is to be logged of a failed connect, or of a connection that ended.
type connFailure struct {
	wanted bool
	lvl    LogLevel
	err    error // nil: told by serveConn
	more   int   // failures that were not logged
	delay  time.Duration
}

// failed tells what is to be logged. Of connects that fail again and again, only some are.
func (n *node) failed(c *Conn, err error, delay time.Duration) connFailure {
	f := connFailure{lvl: LogLevelInfo, delay: delay}
	if c != nil {
		f.wanted = n.direct || n.discovered
		f.lvl = c.log.damped(f.lvl)
		return f
	}
	if n.direct && !n.connectedOnce && !n.discovered { // returned by ConnectToNSQD
		return f
	}
	f.wanted = n.loud
	f.lvl, f.err, f.more = LogLevelWarning, err, n.unsaid
	if n.failures >= persistentFailures && time.Since(n.failing) >= persistentFailing {
		f.lvl = LogLevelError
	}
	return f
}

func (r *Consumer) logFailure(n *node, f connFailure) {
	switch {
	case !f.wanted:
	case f.err == nil:
		r.log.logf(f.lvl, "(%s) re-connecting in %s", printable(n.addr), f.delay)
	default:
		r.log.logf(f.lvl, "(%s) error connecting to nsqd - %s%s, re-connecting in %s", printable(n.addr), f.err, alsoSuppressed(f.more), f.delay)
	}
}

// wasUseful tells whether the connection did not die at once: nsqd may accept connections and yet be of no use. One
// that brought messages may have been, but not if it goes on like that.
func (n *node) wasUseful(c *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.since) >= time.Second {
		n.shortLives = 0
		return true
	}
	n.shortLives++
	return c.counts.received > 0 && n.shortLives <= maxShortLives
}

// maxShortLives is how many connections in a row may end within a second and yet be followed by a quick try.
const maxShortLives = 5

// reconnectDelay is a random part of an interval that doubles with each failure up to a cap, so that the consumers of
// an nsqd that comes back don't all come at once.
func reconnectDelay(cfg *Config, failures int) time.Duration {
	limit := cfg.ReconnectInterval
	for i := 1; i < failures && limit < cfg.MaxReconnectInterval; i++ {
		limit *= 2
	}
	limit = min(limit, cfg.MaxReconnectInterval)
	return time.Duration(rand.Int64N(int64(limit) + 1))
}

// pause waits for the next try, which a nudge brings forward. If the node is dropped, connect will notice.
func (n *node) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-n.nudge:
	case <-n.ctx.Done():
	}
}

// outstanding is how many messages wait for their answer.
func (c *Conn) outstanding() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table.live
}

// closeConn closes a connection gracefully, in the background.
func (r *Consumer) closeConn(c *Conn) {
	first, busy := c.startClose()
	if !first {
		return
	}
	c.log.logf(LogLevelInfo, "beginning close")
	c.giveBackQueued()
	if n := c.outstanding(); n > 0 {
		c.log.logf(LogLevelWarning, "delaying close, %d outstanding messages", n)
	}
	r.inbox.purge()
	r.changed()
	go func() {
		r.abandoned.Add(int64(c.shutDown(r.force, busy)))
		c.wg.Done() // startClose has counted this goroutine
	}()
}
