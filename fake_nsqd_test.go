package nsq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"
)

// fakeNSQD is an in-memory nsqd 1.3.0 as far as a client can see it: one channel of messages, whatever topic and channel
// a connection subscribes to. It shares no code with the library, so that a fault can't be on both sides.
//
// Message ids start from the same value on each fake, since nsqd promises them to be unique for one nsqd only.
type fakeNSQD struct {
	cluster *fakeCluster
	addr    string

	// guarded by cluster.mu
	reach      fakeReach
	dials      []time.Time
	behaviour  fakeBehaviour
	reading    chan struct{} // closed while commands are read
	conns      []*fakeConn   // the open ones, oldest first
	queue      []*fakeMessage
	flooding   bool
	floodEvery time.Duration
	lastID     uint64
	inFlight   map[string]*fakeDelivery
	finished   map[string]bool     // ids
	published  map[string][][]byte // by topic: what clients sent with PUB, MPUB and DPUB
	counts     fakeStats
}

// fakeBehaviour is how a fake nsqd answers. All of it can be changed at any time with fakeNSQD.set.
type fakeBehaviour struct {
	// What IDENTIFY tells the client.
	maxRDY        int64
	msgTimeout    time.Duration // unless the client asks for another one
	maxMsgTimeout time.Duration
	heartbeat     time.Duration        // unless the client asks for another one
	authSecret    string               // not empty: auth_required, and this is the secret
	plainOK       bool                 // IDENTIFY is answered by "OK" alone, and nothing is negotiated
	editIdentify  func(map[string]any) // may change the answer before it is sent; what is negotiated stays

	// Upgrades that are granted to those who ask for them.
	tls, snappy, deflate bool
	tlsConfig            *tls.Config // nil: the certificate of fakeCert, for any client

	// Transport. For connections to come: how many bytes a socket holds in each direction, 0 for none.
	socketBuffer int
	dialDelay    time.Duration
	segment      int // bytes per write towards the client: 0 a frame, segmentGlue as many as there are

	// Misbehaviour.
	steps        map[string]fakeStep // by command or upgrade ("TLS", "SNAPPY", "DEFLATE"): another answer
	refuseSubs   int                 // so many SUBs are yet to be refused with E_SUB_FAILED
	failFIN      bool                // each message times out just before its FIN
	overRDY      int                 // messages sent beyond RDY, also at RDY 0
	lateLowered  bool                // a message within 10 ms of a lower RDY still goes by the old one, as happens with nsqd
	stragglers   int                 // so many messages are sent after CLOSE_WAIT, if there within 10 ms
	readDelay    time.Duration       // a command is read this long after it was sent, in order
	noHeartbeats bool                // and, as none are to be answered, no closing of silent connections
	silent       bool                // nothing at all is sent; it is kept for later
	paused       bool                // the channel is paused

	// Scripts. onCommand is called for each command once it is in the log, in the connection's own goroutine. If it
	// returns true the fake does nothing about the command. afterCommand is called after the fake has done its part; with
	// segmentGlue, what it sends shares a segment with the answer. Both may call all methods but those that wait.
	onCommand    func(c *fakeConn, line string, body []byte) (handled bool)
	afterCommand func(c *fakeConn, line string)
}

// fakeStep replaces what a fake nsqd does at one step. Its zero value changes nothing.
type fakeStep struct {
	delay  time.Duration // wait before going on
	never  bool          // take effect, but don't answer
	err    string        // send this error frame instead of taking effect; a fatal one closes the connection
	raw    []byte        // send these bytes instead of taking effect
	hangUp bool          // close the connection instead of taking effect, after err or raw where there is one
}

func (s fakeStep) instead() bool { return s.err != "" || s.raw != nil || s.hangUp }

// Bytes that no nsqd should send, for sendRaw and fakeStep.
var (
	fakeHalfFrame  = []byte("\x00\x00\x00\x64\x00\x00\x00\x02half a message")
	fakeHTTPAnswer = []byte("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request")
)

func defaultFakeBehaviour() fakeBehaviour {
	return fakeBehaviour{
		maxRDY:        2500,
		msgTimeout:    time.Minute,
		maxMsgTimeout: 15 * time.Minute,
		heartbeat:     30 * time.Second,
		socketBuffer:  64 << 10,
		steps:         make(map[string]fakeStep),
	}
}

// set changes the behaviour and lets all connections notice.
func (n *fakeNSQD) set(change func(b *fakeBehaviour)) {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	wasMute := n.behaviour.mute()
	change(&n.behaviour)
	if wasMute && !n.behaviour.mute() {
		n.forgiveSilenceLocked()
	}
	n.wakeLocked()
}

// mute tells whether clients get no heartbeats, and so have no reason to say anything either.
func (b *fakeBehaviour) mute() bool { return b.noHeartbeats || b.silent }

// at replaces what happens at a step, for example "SUB" or "TLS". The zero fakeStep puts it back.
func (n *fakeNSQD) at(step string, s fakeStep) {
	n.set(func(b *fakeBehaviour) { b.steps[step] = s })
}

// socketBuffer returns the size for a connection that is being made.
func (n *fakeNSQD) socketBuffer() int {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	return n.behaviour.socketBuffer
}

// stopReading leaves what clients send in the socket, until startReading.
func (n *fakeNSQD) stopReading() {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	if !n.readsLocked() {
		return
	}
	n.reading = make(chan struct{})
	for _, c := range n.conns {
		c.raw.SetReadDeadline(time.Unix(1, 0)) // ends the Read that is waiting
	}
}

// startReading ends stopReading.
func (n *fakeNSQD) startReading() {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	n.startReadingLocked()
}

func (n *fakeNSQD) startReadingLocked() {
	if n.readsLocked() {
		return
	}
	for _, c := range n.conns {
		c.raw.SetReadDeadline(time.Time{})
	}
	n.forgiveSilenceLocked()
	close(n.reading)
	n.wakeLocked()
}

// stopReadingFor is stopReading with an end.
func (n *fakeNSQD) stopReadingFor(d time.Duration) {
	n.stopReading()
	n.cluster.later(d, n.startReadingLocked)
}

func (n *fakeNSQD) readsLocked() bool {
	return isFakeClosed(n.reading)
}

// forgiveSilenceLocked restarts the count of silent heartbeat intervals, after a time in which it was not the clients' fault.
func (n *fakeNSQD) forgiveSilenceLocked() {
	for _, c := range n.conns {
		c.lastRead = time.Now()
	}
}

func (n *fakeNSQD) wakeLocked() {
	for _, c := range n.conns {
		fakeSignal(c.wake)
	}
}

// fakeSignal leaves word in a channel of size 1, unless there is some already.
func fakeSignal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// fakeMessage is a message that is not finished.
type fakeMessage struct {
	id        string
	body      []byte
	timestamp time.Time
	attempts  uint16
}

// fakeDelivery is a message in flight.
type fakeDelivery struct {
	message *fakeMessage
	conn    *fakeConn
	sent    time.Time
	expires time.Time
	timer   *time.Timer // runs timeOutLocked at expires
}

// setTimeoutLocked starts or restarts the time that the client has for an answer.
func (d *fakeDelivery) setTimeoutLocked(timeout time.Duration) {
	if d.timer != nil {
		d.timer.Stop()
	}
	d.expires = time.Now().Add(timeout)
	d.timer = d.conn.nsqd.cluster.later(timeout, func() { d.conn.nsqd.timeOutLocked(d) })
}

// publish puts messages into the channel and returns their ids.
func (n *fakeNSQD) publish(bodies ...string) []string {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	ids := make([]string, len(bodies))
	for i, body := range bodies {
		m := n.newMessageLocked([]byte(body))
		n.queue = append(n.queue, m)
		ids[i] = m.id
	}
	n.wakeLocked()
	return ids
}

// publishN publishes count messages whose bodies are "1", "2" and so on.
func (n *fakeNSQD) publishN(count int) []string {
	bodies := make([]string, count)
	for i := range bodies {
		bodies[i] = fmt.Sprint(i + 1)
	}
	return n.publish(bodies...)
}

// flood makes messages come without end: one every so often, or with 0 as fast as clients take them. In a bubble 0 needs
// a client that takes time over a message, or the clock never moves.
func (n *fakeNSQD) flood(every time.Duration) {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	n.flooding, n.floodEvery = true, every
	if every > 0 {
		n.cluster.later(every, func() { n.floodNextLocked(every) })
	}
	n.wakeLocked()
}

// stopFlood ends flood. What was published stays.
func (n *fakeNSQD) stopFlood() {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	n.flooding = false
}

// floodNextLocked publishes a message of a flood, if clients keep up, and sees to the next one.
func (n *fakeNSQD) floodNextLocked(every time.Duration) {
	const enough = 100 // messages waiting
	if !n.flooding || n.floodEvery != every {
		return
	}
	if len(n.queue) < enough {
		n.queue = append(n.queue, n.newMessageLocked([]byte("flood")))
		n.wakeLocked()
	}
	n.cluster.later(every, func() { n.floodNextLocked(every) })
}

func (n *fakeNSQD) newMessageLocked(body []byte) *fakeMessage {
	n.lastID++
	n.counts.Published++
	return &fakeMessage{id: fmt.Sprintf("%016x", n.lastID), body: body, timestamp: time.Now()}
}

// waitingLocked tells whether there is a message to be sent.
func (n *fakeNSQD) waitingLocked() bool {
	return len(n.queue) > 0 || n.endlessLocked()
}

func (n *fakeNSQD) endlessLocked() bool { return n.flooding && n.floodEvery == 0 }

// takeLocked takes the next message from the channel; there has to be one.
func (n *fakeNSQD) takeLocked() *fakeMessage {
	if len(n.queue) == 0 {
		return n.newMessageLocked([]byte("flood"))
	}
	m := n.queue[0]
	n.queue = n.queue[1:]
	return m
}

// requeueLocked puts a message back, now or later.
func (n *fakeNSQD) requeueLocked(m *fakeMessage, delay time.Duration) {
	if delay <= 0 {
		n.queue = append(n.queue, m)
		n.wakeLocked()
		return
	}
	n.counts.Deferred++
	n.cluster.later(delay, func() {
		n.counts.Deferred--
		n.queue = append(n.queue, m)
		n.wakeLocked()
	})
}

// beginLocked puts m in flight for c. If it is so already, for whatever connection, this delivery replaces the other.
func (n *fakeNSQD) beginLocked(c *fakeConn, m *fakeMessage) {
	if old := n.inFlight[m.id]; old != nil {
		n.endLocked(old)
	}
	d := &fakeDelivery{message: m, conn: c, sent: time.Now()}
	d.setTimeoutLocked(c.msgTimeout)
	n.inFlight[m.id] = d
	c.inFlight++
	n.cluster.inFlight++
	n.cluster.maxInFlight = max(n.cluster.maxInFlight, n.cluster.inFlight)
	n.counts.Delivered++
	n.counts.MaxInFlight = max(n.counts.MaxInFlight, len(n.inFlight))
}

// endLocked takes a delivery out of flight.
func (n *fakeNSQD) endLocked(d *fakeDelivery) {
	d.timer.Stop()
	delete(n.inFlight, d.message.id)
	d.conn.inFlight--
	n.cluster.inFlight--
	fakeSignal(d.conn.wake)
}

// timeOutLocked is the callback of a delivery's timer. A TOUCH may have been quicker to get the lock.
func (n *fakeNSQD) timeOutLocked(d *fakeDelivery) {
	if n.inFlight[d.message.id] == d && !time.Now().Before(d.expires) {
		n.expireLocked(d)
	}
}

// expireLocked requeues a message that was not answered in time. The client is not told.
func (n *fakeNSQD) expireLocked(d *fakeDelivery) {
	n.endLocked(d)
	n.counts.TimedOut++
	d.conn.logLocked(fakeEntry{Kind: entryExpired, ID: d.message.id, Attempts: d.message.attempts})
	n.requeueLocked(d.message, 0)
}

// expire lets messages in flight time out now: those with the given ids, or all.
func (n *fakeNSQD) expire(ids ...string) {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	if len(ids) == 0 {
		ids = slices.Sorted(maps.Keys(n.inFlight))
	}
	for _, id := range ids {
		if d := n.inFlight[id]; d != nil {
			n.expireLocked(d)
		}
	}
}

// errFakeNotInFlight and errFakeNotOwner are nsqd's reasons for refusing a FIN, REQ or TOUCH.
var (
	errFakeNotInFlight = errors.New("ID not in flight")
	errFakeNotOwner    = errors.New("client does not own message")
)

// deliveryLocked returns the delivery of a message to c.
func (n *fakeNSQD) deliveryLocked(c *fakeConn, id string) (*fakeDelivery, error) {
	switch d := n.inFlight[id]; {
	case d == nil:
		return nil, errFakeNotInFlight
	case d.conn != c:
		return nil, errFakeNotOwner
	default:
		return d, nil
	}
}

func (n *fakeNSQD) finishLocked(c *fakeConn, id string) error {
	d, err := n.deliveryLocked(c, id)
	if err == nil && n.behaviour.failFIN {
		n.expireLocked(d)
		err = errFakeNotInFlight
	}
	if err != nil {
		return err
	}
	n.endLocked(d)
	n.finished[id] = true
	n.counts.Finished++
	return nil
}

func (n *fakeNSQD) requeueForLocked(c *fakeConn, id string, delay time.Duration) error {
	d, err := n.deliveryLocked(c, id)
	if err != nil {
		return err
	}
	n.endLocked(d)
	n.counts.Requeued++
	n.requeueLocked(d.message, delay)
	return nil
}

// touchLocked gives a message a full timeout again, within max_msg_timeout from its sending.
func (n *fakeNSQD) touchLocked(c *fakeConn, id string) error {
	d, err := n.deliveryLocked(c, id)
	if err != nil {
		return err
	}
	n.counts.Touched++
	left := time.Until(d.sent.Add(n.behaviour.maxMsgTimeout))
	d.setTimeoutLocked(max(0, min(c.msgTimeout, left)))
	return nil
}

// fakeStats are the counters of a fake nsqd.
type fakeStats struct {
	Published int // with publish and flood, not by clients
	Delivered int // a message sent twice counts twice
	Finished  int
	Requeued  int // with REQ
	TimedOut  int
	Touched   int
	Failed    int // FIN, REQ and TOUCH answered by an error

	InFlight    int // now
	MaxInFlight int // ever
	Depth       int // messages waiting
	Deferred    int // messages waiting for the end of their REQ delay
	Conns       int // open connections
	RDY         int64
}

// stats returns the counters. RDY is the sum over open connections.
func (n *fakeNSQD) stats() fakeStats {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	s := n.counts
	s.InFlight, s.Depth, s.Conns = len(n.inFlight), len(n.queue), len(n.conns)
	for _, c := range n.conns {
		s.RDY += c.rdy
	}
	return s
}

// isFinished tells whether the message was finished.
func (n *fakeNSQD) isFinished(id string) bool {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	return n.finished[id]
}

// publishedTo returns the bodies that clients have published to topic.
func (n *fakeNSQD) publishedTo(topic string) []string {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	bodies := []string{}
	for _, body := range n.published[topic] {
		bodies = append(bodies, string(body))
	}
	return bodies
}

// commands returns the lines of all commands read by this nsqd but those whose name is in except.
func (n *fakeNSQD) commands(except ...string) []string { return n.cluster.commands(n.addr, except...) }

// conn returns the newest open connection, nil if there is none.
func (n *fakeNSQD) conn() *fakeConn {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	if len(n.conns) == 0 {
		return nil
	}
	return n.conns[len(n.conns)-1]
}

// waitSubscribed waits until the newest connection is subscribed, and returns it.
func (n *fakeNSQD) waitSubscribed() *fakeConn {
	n.cluster.t.Helper()
	var c *fakeConn
	n.cluster.waitUntil(func() bool {
		c = n.conn()
		return c != nil && c.subscribed()
	})
	return c
}

// dropAll resets all connections.
func (n *fakeNSQD) dropAll() {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	for len(n.conns) > 0 {
		n.conns[0].dropLocked()
	}
}

// closeAll hangs up on all connections, as nsqd does when it shuts down.
func (n *fakeNSQD) closeAll() {
	n.cluster.mu.Lock()
	defer n.cluster.mu.Unlock()
	for len(n.conns) > 0 {
		n.conns[0].closeLocked("nsqd shuts down")
	}
}

// serveLocked starts the goroutines of a connection.
func (n *fakeNSQD) serveLocked(nc net.Conn) {
	cluster := n.cluster
	cluster.conns++
	c := newFakeConn(n, cluster.conns, nc)
	n.conns = append(n.conns, c)
	c.logLocked(fakeEntry{Kind: entryOpened})
	cluster.wg.Go(c.readLoop)
	cluster.wg.Go(c.processLoop)
	cluster.wg.Go(c.sendLoop)
}
