package nsq

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	heartbeat = "_heartbeat_"
	closeWait = "CLOSE_WAIT"
)

var nopLine = []byte("NOP\n")

// Conn is one connection to an nsqd. A Consumer makes its own; a program may make one with NewConn to speak the
// protocol itself.
//
// Two goroutines serve it. readLoop answers heartbeats and hands on messages, whatever handlers do. writeLoop sends
// what has gathered in the meantime in one call; it is the only one that writes.
type Conn struct {
	addr     string // as it was configured; names the connection
	config   *Config
	owner    connOwner
	delegate MessageDelegate // of all messages of this connection
	log      *loggers

	transport *transport // set by the handshake; the loops begin after it
	maxRDY    atomic.Int64
	lastRDY   atomic.Int64 // when RDY was last set above 0, by monotonic; 0: never
	created   time.Time
	rdy       atomic.Int64 // what RDY reports

	connecting atomic.Bool // Connect was called
	closing    atomic.Bool // no new work: CLS is queued, Close was called, or the connection has ended

	wake     chan struct{} // size 1: writeLoop has something to do
	settled  chan struct{} // size 1: while closing, nothing is unanswered or unwritten any more
	waitSeen chan struct{} // closed when CLOSE_WAIT came
	done     chan struct{} // closed when the connection has ended
	wg       sync.WaitGroup

	mu            sync.Mutex // guards the fields below, for a few lines at a time, never across I/O or a user's code
	stopConnect   context.CancelCauseFunc
	remote        net.Addr
	msgTimeout    time.Duration // negotiated; 0: not known
	maxMsgTimeout time.Duration // negotiated; 0: not known
	roundTrip     time.Duration // the shortest that nsqd took to answer while connecting
	ended         bool
	err           error // why it ended; nil: it was asked to
	since         time.Time

	table    inFlightTable
	peak     int    // most unanswered messages since the last look at demand
	fresh    int64  // messages since the last look at demand
	noted    bool   // rdyLoop knows of fresh ones
	timed    bool   // rdyLoop will come for the next deadline
	watched  bool   // rdyLoop wants to know of answers
	lent     bool   // rdyLoop wants to know when RDY is used up
	probe    uint64 // the backoff period that messages which come now are a probe of; 0: none
	lastRead int64  // when messages came last, by monotonic; 0: never
	lastBeat int64  // when a heartbeat came last

	out         []byte        // commands for writeLoop
	outAnswers  int           // the FIN and REQ among them
	unwritten   int           // FIN and REQ queued or being written
	round       uint64        // counts what writeLoop took, so that a message has one TOUCH in each
	writing     bool          // writeLoop is in a write
	nop         bool          // a heartbeat waits for its answer
	wantRDY     int64         // a mailbox: the last value wins
	wantProbe   uint64        // what probe becomes when wantRDY is taken
	probes      []deliveryRef // came as probes, and may be unanswered; oldest first
	takenRDY    int64         // last taken by writeLoop
	writtenRDY  int64         // last written
	held        int64         // RDY before a lowering that nsqd may not have read yet; 0 once it must have
	heldUntil   int64         // when it must have, by monotonic
	highestRDY  int64
	largest     int   // the most memory that a message has taken
	dropped     int64 // messages that makeRoom has dropped lately
	dropping    int64 // until when they count, by monotonic
	allowed     int64 // RDY that a program sent last, by WriteCommand
	clsQueued   bool
	clsReceived uint64       // messages when it was queued
	waiters     []chan error // of WriteCommand, for what is in out

	counts connCounts
}

// connCounts are what a connection counts.
type connCounts struct {
	received, finished, requeued uint64
	expired                      uint64 // messages whose timeout passed before they were answered
	late                         uint64 // answers that came too late by nsqd's word
}

func (c *connCounts) add(o connCounts) {
	c.received += o.received
	c.finished += o.finished
	c.requeued += o.requeued
	c.expired += o.expired
	c.late += o.late
}

// connOwner is who a Conn works for: a Consumer, or the delegate of a Conn made by NewConn. Methods are called without
// locks held, by readLoop if nothing else is said.
type connOwner interface {
	// received gets messages that were entered as unanswered.
	received(c *Conn, ms *arrivals)
	// concerns tells whether decide has to be asked about an answer.
	concerns(a answer) bool
	// decide is asked about an answer before it is queued, by whoever answers. If it returns true, it has queued the
	// answer or will, after the RDY that the answer causes.
	decide(c *Conn, m *Message, a answer) bool
	// ranInVain is told of messages that handlers have, but which nsqd will deliver again. By any goroutine.
	ranInVain(ids []MessageID)
	// lateAnswer is told of an answer that was not sent, since the message had expired or the connection is gone. By
	// whoever answers.
	lateAnswer(c *Conn, m *Message, gone bool)
	response(c *Conn, data []byte)
	protocolError(c *Conn, err *ProtocolError, data []byte)
	heartbeat(c *Conn)
	// changed is told that RDY was written, or something else happened that rdyLoop waits for. By any goroutine.
	changed()
	// failed is told that the connection has ended by a read or write error, once; expected if it was to end anyway.
	// By any goroutine.
	failed(c *Conn, err error, expected bool)
}

// answer is a FIN or a REQ.
type answer struct {
	finish  bool
	delay   time.Duration // of a REQ, as the user gave it
	backoff bool          // of a REQ: it is a failure that counts
}

func (a answer) String() string {
	if a.finish {
		return "FIN"
	}
	return "REQ"
}

func newConn(addr string, config *Config, owner connOwner, log *loggers) *Conn {
	c := &Conn{
		addr:     addr,
		config:   config,
		owner:    owner,
		log:      log,
		created:  time.Now(),
		wake:     make(chan struct{}, 1),
		settled:  make(chan struct{}, 1),
		waitSeen: make(chan struct{}),
		done:     make(chan struct{}),
		round:    1,
	}
	c.delegate = &messageAnswers{c}
	c.table.lastGen = rand.Uint32() >> 1 // so that a message of another connection is not taken for one of this
	c.maxRDY.Store(defaultMaxRDY)
	return c
}

// begin starts writeLoop. The caller goes on with readLoop.
func (c *Conn) begin() error {
	if err := c.transport.socket.watchSilence(acceptedSilence(c.config)); err != nil {
		return err
	}
	c.mu.Lock()
	c.since = time.Now()
	c.mu.Unlock()
	c.wg.Go(c.writeLoop)
	return nil
}

// end ends the connection: its messages are nobody's any more, its goroutines return. The first call decides why.
func (c *Conn) end(err error) {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	c.err = err
	expected := c.closing.Swap(true)
	var ran []MessageID
	for s := c.table.oldest(); s != nil; s = c.table.oldest() {
		if id := s.id; c.table.retire(s) {
			ran = append(ran, id)
		}
	}
	c.table.release()
	c.out, c.unwritten, c.outAnswers = nil, 0, 0
	waiters := c.waiters
	c.waiters = nil
	transport, stopConnect := c.transport, c.stopConnect
	c.mu.Unlock()

	reply(waiters, ErrNotConnected)
	close(c.done)
	if stopConnect != nil {
		stopConnect(ErrClosing)
	}
	if transport != nil {
		transport.close()
	}
	if err != nil {
		c.owner.failed(c, err, expected)
	}
	c.owner.ranInVain(ran)
	c.owner.changed()
}

// ---- reading

// readLoop reads until the connection ends and says why; nil after a close that was asked for.
func (c *Conn) readLoop() error {
	err := c.read()
	// Compression knows of ends of its own, so that the stream's comes unexpected.
	if c.IsClosing() && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)) {
		err = nil
	}
	c.end(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *Conn) read() error {
	frames := newFrameReader(c.transport.r, c.config.MaxMsgSize)
	frames.maxText = maxText
	var batch messageBatch
	for {
		for {
			frameType, data, body, ok, err := frames.next()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			if frameType == FrameTypeMessage {
				if batch.full(data, body) {
					if err := c.deliver(&batch); err != nil {
						return err
					}
				}
				if err := batch.add(data, body); err != nil {
					return err
				}
				continue
			}
			if err := c.deliver(&batch); err != nil {
				return err
			}
			if err := c.handleFrame(frameType, append(data, body...)); err != nil { // a long text came in two parts
				return err
			}
		}
		if err := c.deliver(&batch); err != nil {
			return err
		}
		if err := frames.fill(); err != nil {
			return err
		}
	}
}

// deliver enters the messages of a batch and hands them on.
func (c *Conn) deliver(batch *messageBatch) error {
	if batch.empty() {
		return nil
	}
	ms := batch.take()
	ms.conn = c
	tell, err := c.enter(ms, monotonic())
	if err != nil {
		return err
	}
	if tell {
		c.owner.changed()
	}
	c.owner.received(c, ms)
	return nil
}

// enter makes the messages count as unanswered. It reports whether rdyLoop should look.
func (c *Conn) enter(ms *arrivals, now int64) (tell bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false, net.ErrClosed
	}
	var limit int64
	if c.msgTimeout > 0 {
		ms.deadline = now + int64(c.msgTimeout)
	}
	if c.maxMsgTimeout > 0 {
		limit = now + int64(c.maxMsgTimeout)
	}
	c.makeRoom(ms.messages, now)
	for i := range ms.messages {
		m := &ms.messages[i]
		m.NSQDAddress = c.addr
		m.Delegate = c.delegate
		if old := c.table.find(&m.ID); old != nil { // its timeout has passed for nsqd
			c.table.retire(old)
			c.counts.expired++
		}
		s := c.table.insert(m, ms.deadline, messageSize(m))
		s.limit, s.period = limit, c.probe
		m.ref = s.ref
		if c.probe != 0 {
			if len(c.probes) >= 2*c.table.live+64 { // the same ones again and again
				c.forgetProbes()
			}
			c.probes = append(c.probes, s.ref)
		}
	}
	c.counts.received += uint64(len(ms.messages))
	c.fresh += int64(len(ms.messages))
	c.lastRead = now
	live := c.table.live
	c.peak = max(c.peak, live)
	if int64(live+c.unwritten) >= c.held {
		c.held = 0 // they are counted as unanswered now, and there can't be more
	}
	if n := int64(live+c.unwritten) + c.dropped; n > 4*c.highestRDY+1024 || c.table.bytes > c.bytesFor(4*c.highestRDY) {
		return false, &TooManyUnansweredError{Unanswered: n, MaxRDY: c.highestRDY}
	}
	tell = !c.noted || !c.timed && c.msgTimeout > 0 || c.lent && int64(live) >= c.writtenRDY
	c.noted, c.timed = true, true
	return tell, nil
}

const (
	messageOverhead = 512     // what a message takes beside its body
	spareBytes      = 1 << 20 // that messages may take whatever RDY is
)

// messageSize is the memory that a message is taken to need.
func messageSize(m *Message) int { return messageOverhead + len(m.Body) }

// bytesFor is the memory that so many messages may take.
func (c *Conn) bytesFor(messages int64) int64 { return messages*int64(c.largest) + spareBytes }

// makeRoom drops the oldest messages that wait for a handler if together with ms they would take more memory than the
// highest RDY stands for. nsqd never has more than that in flight for us: when it sends more, it has taken the oldest back,
// though by our clock their timeout may not have passed yet.
func (c *Conn) makeRoom(ms []Message, now int64) {
	var size int64
	for i := range ms {
		n := messageSize(&ms[i])
		c.largest = max(c.largest, n)
		size += int64(n)
	}
	if now >= c.dropping {
		c.dropped = 0
	}
	over := c.table.bytes + size - c.bytesFor(c.highestRDY)
	if over <= 0 {
		return
	}
	if c.dropped == 0 {
		c.dropping = now + int64(cmp.Or(c.msgTimeout, time.Minute))
	}
	n := c.table.dropOldest(over)
	c.dropped += int64(n)
	c.counts.expired += uint64(n)
}

func (c *Conn) handleFrame(frameType int32, data []byte) error {
	switch frameType {
	case FrameTypeResponse:
		switch string(data) {
		case heartbeat:
			c.log.logf(LogLevelDebug, "heartbeat received")
			c.mu.Lock()
			c.nop = true
			c.lastBeat = monotonic()
			c.mu.Unlock()
			c.signal()
			c.owner.heartbeat(c)
		case closeWait:
			c.sawCloseWait()
			c.owner.response(c, data)
		default:
			c.owner.response(c, data)
		}
		return nil
	case FrameTypeError:
		perr := c.parseError(data)
		if perr.Fatal() {
			c.owner.protocolError(c, perr, data)
			return perr
		}
		c.lose(perr)
		c.owner.protocolError(c, perr, data)
		return nil
	}
	return &UnexpectedFrameError{frameType}
}

func (c *Conn) sawCloseWait() {
	c.mu.Lock()
	expected := c.clsQueued
	c.mu.Unlock()
	if !expected {
		return
	}
	select {
	case <-c.waitSeen:
	default:
		close(c.waitSeen)
	}
}

// lose counts an answer that came too late. A message whose TOUCH was refused is not ours any more. A refused FIN or REQ
// was the end of its delivery: if the ID is in the table all the same, it has come again, and is ours.
func (c *Conn) lose(perr *ProtocolError) {
	c.mu.Lock()
	c.counts.late++
	lost := false
	if id, ok := perr.MessageID(); ok && perr.Code == "E_TOUCH_FAILED" {
		if s := c.table.find(&id); s != nil {
			c.table.retire(s)
			lost = true
		}
	}
	tell := lost && (c.watched || c.closing.Load())
	c.settleLocked()
	c.mu.Unlock()
	if tell {
		c.owner.changed()
	}
}

// expire drops the messages whose deadline has passed, and returns their number.
func (c *Conn) expire(now int64) (n int) {
	var ran []MessageID
	c.mu.Lock()
	for s := c.table.due(now); s != nil; s = c.table.due(now) {
		n++
		if id := s.id; c.table.retire(s) {
			ran = append(ran, id)
		}
	}
	c.counts.expired += uint64(n)
	c.settleLocked()
	c.mu.Unlock()
	c.owner.ranInVain(ran)
	return n
}

// expireTaken drops a message that a handler was about to begin, too late.
func (c *Conn) expireTaken(m *Message) {
	c.mu.Lock()
	if s := c.table.get(m.ref); s != nil {
		c.table.remove(s)
		c.counts.expired++
	} else { // expire was quicker, and took it for one that is being handled
		c.table.forgetOverdue(m.ref)
	}
	tell := c.watched
	c.settleLocked()
	c.mu.Unlock()
	if tell {
		c.owner.changed()
	}
}

// giveBack requeues a message that no handler has begun.
func (c *Conn) giveBack(m *Message) {
	if m.state.answer() {
		c.queueAnswer(m, answer{})
	}
}

// giveBackQueued gives back all messages that no handler has begun.
func (c *Conn) giveBackQueued() {
	c.mu.Lock()
	queued := c.table.queued()
	c.mu.Unlock()
	for _, m := range queued {
		if m.state.drop() {
			c.giveBack(m)
		}
	}
}

// ---- answers

// messageAnswers is the delegate of a connection's messages.
type messageAnswers struct{ c *Conn }

func (a *messageAnswers) OnFinish(m *Message) { a.c.answer(m, answer{finish: true}) }

func (a *messageAnswers) OnRequeue(m *Message, delay time.Duration, backoff bool) {
	a.c.answer(m, answer{delay: delay, backoff: backoff})
}

func (a *messageAnswers) OnTouch(m *Message) { a.c.touch(m) }

// answer carries out a FIN or REQ. It never blocks on the network.
func (c *Conn) answer(m *Message, a answer) {
	if c.owner.concerns(a) {
		if m = c.claimant(m, a); m == nil || c.owner.decide(c, m, a) {
			return
		}
	}
	c.queueAnswer(m, a)
}

// claimant returns the message that m answers for, nil if that has its answer already.
func (c *Conn) claimant(m *Message, a answer) *Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, m = c.claimantLocked(m, a)
	return m
}

// claimantLocked also returns the slot of that message, nil if it does not count as unanswered any more. A program may
// answer by a copy of a message, or by one that it made by hand and gave our delegate, as middleware does.
func (c *Conn) claimantLocked(m *Message, a answer) (*slot, *Message) {
	s := c.live(m)
	if s == nil {
		if _, overdue := c.table.overdueByRef[m.ref]; overdue || c.ended && m.ref != (deliveryRef{}) {
			return nil, m
		}
		return nil, nil
	}
	if s.m == m {
		return s, m
	}
	// While the message is queued it has come again, and what m was made of is over: as with an overdue delivery, only a FIN
	// still has a meaning.
	if s.m.state.queued() && (!a.finish || !s.m.state.drop()) || !s.m.state.answer() {
		return nil, nil
	}
	return s, s.m
}

// live returns the slot of the delivery that m belongs to, nil if that is over.
func (c *Conn) live(m *Message) *slot {
	if m.ref == (deliveryRef{}) {
		return c.table.find(&m.ID)
	}
	return c.table.get(m.ref)
}

// queueAnswer appends the command to what writeLoop writes next, if the message is still this connection's.
func (c *Conn) queueAnswer(m *Message, a answer) {
	c.mu.Lock()
	s, m := c.claimantLocked(m, a)
	if s == nil && m != nil && !c.ended {
		s = c.claimOverdue(m, a)
	}
	if s == nil {
		gone := c.ended
		c.mu.Unlock()
		if m != nil {
			c.owner.lateAnswer(c, m, gone)
		}
		return
	}
	if a.finish {
		c.out = appendFinish(c.out, s.id)
		c.counts.finished++
	} else {
		c.out = appendRequeue(c.out, s.id, c.requeueDelay(m, a.delay))
		c.counts.requeued++
	}
	if s.m == m {
		c.table.remove(s)
	} else {
		c.table.retire(s) // whoever has it answers in vain
	}
	c.outAnswers++
	c.unwritten++
	c.mu.Unlock()
	c.signal()
	if c.log.enabled(LogLevelDebug) {
		c.log.logf(LogLevelDebug, "%s %s", a, m.ID[:])
	}
}

// claimOverdue returns the slot that the answer to an overdue delivery may still end, if any: nsqd would take it as one to
// the delivery that came later, or not at all. If the message came again meanwhile, the work is done, so the new copy need
// not be handled; nsqd has the ID in flight for us, and takes FIN for it. A REQ or TOUCH would only disturb the new one.
func (c *Conn) claimOverdue(m *Message, a answer) *slot {
	old, _ := c.table.forgetOverdue(m.ref)
	if !a.finish {
		return nil
	}
	return c.table.find(&old.id)
}

// requeueDelay is the delay of a REQ: -1 stands for one that grows with the attempts.
func (c *Conn) requeueDelay(m *Message, d time.Duration) time.Duration {
	if d != -1 {
		return d // appendRequeue keeps it within what nsqd takes
	}
	return min(c.config.DefaultRequeueDelay*time.Duration(m.Attempts), c.config.MaxRequeueDelay)
}

// touch queues a TOUCH and moves the deadline.
func (c *Conn) touch(m *Message) {
	c.mu.Lock()
	s := c.live(m)
	if s == nil {
		old, overdue := c.table.overdueByRef[m.ref]
		gone, superseded := c.ended, c.table.find(&old.id) != nil
		c.mu.Unlock()
		if gone && m.ref != (deliveryRef{}) || overdue && !superseded {
			c.owner.lateAnswer(c, m, gone)
		}
		return
	}
	if s.m != m && (s.m.HasResponded() || s.m.state.queued()) || s.touched == c.round { // one is on its way already
		c.mu.Unlock()
		return
	}
	s.touched = c.round
	c.out = appendTouch(c.out, s.id)
	if s.deadline != 0 {
		deadline := monotonic() + int64(c.msgTimeout)
		if s.limit != 0 {
			deadline = min(deadline, s.limit)
		}
		c.table.postpone(s, deadline)
	}
	c.mu.Unlock()
	c.signal()
}

// probePeriod is the backoff period that the answer to a message decides on; 0: none.
func (c *Conn) probePeriod(m *Message) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.table.get(m.ref); s != nil {
		return s.period
	}
	return c.table.overdueByRef[m.ref].period
}

// ---- writing

// signal wakes writeLoop. It never blocks.
func (c *Conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default: // it is awake, and will find what there is
	}
}

// setRDY leaves n for writeLoop, which sends it ahead of queued answers. Messages that arrive once n is on its way, and
// until a RDY of 0 is written, belong to this backoff period (0: they decide nothing).
func (c *Conn) setRDY(n int64, period uint64) {
	c.mu.Lock()
	c.wantRDY, c.wantProbe = n, period
	if n == c.takenRDY {
		c.probe = period
	}
	c.mu.Unlock()
	c.noteRDY(n)
	c.signal()
}

// endProbe has messages decide nothing from now on: backoff is over.
func (c *Conn) endProbe() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probe, c.wantProbe, c.probes = 0, 0, nil
}

func (c *Conn) noteRDY(n int64) {
	c.rdy.Store(n)
	if n > 0 {
		c.lastRDY.Store(monotonic())
	}
}

// writeLoop sends what gathers. Nothing waits for a timer: what comes while it writes goes out in the next call.
func (c *Conn) writeLoop() {
	var spare []byte
	for {
		select {
		case <-c.wake:
		case <-c.done:
			return
		}
		batch := c.takeOut(spare)
		if len(batch.bytes) == 0 {
			reply(batch.waiters, nil)
			c.settle()
			spare = batch.bytes // the other one of the two buffers
			continue
		}
		if batch.rdy {
			c.log.logf(LogLevelDebug, "sending RDY %d", batch.count)
		}
		err := c.transport.write(batch.bytes)
		reply(batch.waiters, err)
		if err != nil {
			c.end(err)
			return
		}
		c.wrote(batch)
		spare = batch.bytes[:0]
		if cap(spare) > maxWrite {
			spare = nil // one burst shall not hold its memory for ever
		}
	}
}

// reply tells those who wait for a write how it went. Their channels have room.
func reply(waiters []chan error, err error) {
	for _, w := range waiters {
		w <- err
	}
}

// outBatch is what one round of writeLoop writes.
type outBatch struct {
	bytes   []byte
	answers int   // FIN and REQ among them
	rdy     bool  // RDY is among them
	count   int64 // its value
	cls     bool  // CLS is among them, or was written before
	waiters []chan error
}

// takeOut takes what is to be written: RDY first, so that nsqd knows the new ceiling before an answer makes room under
// it. spare is memory to use.
func (c *Conn) takeOut(spare []byte) outBatch {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := outBatch{answers: c.outAnswers, cls: c.clsQueued, waiters: c.waiters}
	if c.wantRDY != c.takenRDY && !c.clsQueued {
		b.rdy, b.count = true, c.wantRDY
		c.takenRDY = c.wantRDY
		if c.takenRDY > 0 {
			c.probe = c.wantProbe
		}
		c.highestRDY = max(c.highestRDY, c.takenRDY)
		spare = appendReady(spare, c.takenRDY)
	}
	if c.nop {
		c.nop = false
		spare = append(spare, nopLine...)
	}
	if len(spare) == 0 {
		b.bytes, c.out = c.out, spare
	} else {
		b.bytes = append(spare, c.out...)
		c.out = c.out[:0]
	}
	c.outAnswers, c.waiters = 0, nil
	c.round++
	c.writing = len(b.bytes) > 0
	return b
}

// wrote notes what nsqd is about to know.
func (c *Conn) wrote(b outBatch) {
	c.mu.Lock()
	c.writing = false
	c.unwritten -= b.answers
	if c.ended {
		c.unwritten = 0
	}
	if b.cls {
		c.takenRDY = 0 // CLS sets RDY to 0 at nsqd
	}
	c.hold(b.answers)
	c.writtenRDY = c.takenRDY
	if b.rdy && b.count == 0 {
		c.probe = 0 // until now it may have come by the RDY before
	}
	tell := b.rdy || b.cls || b.answers > 0 && c.watched
	c.settleLocked()
	c.mu.Unlock()
	if tell {
		c.owner.changed()
	}
}

// A lowering is held back from others for one and a half of the round trips seen while connecting. minHold is for an nsqd
// nearby that is in the middle of sending, maxHold for one that took long to answer for another reason.
const (
	minHold = 2 * time.Millisecond
	maxHold = 150 * time.Millisecond
)

// holdTime is how long after a lowering messages may come that nsqd sent before it read of it.
func (c *Conn) holdTime() time.Duration { return min(max(c.roundTrip+c.roundTrip/2, minHold), maxHold) }

// hold begins the time in which messages may come by the RDY before the one just written, if that was a lowering. The
// answers are those behind it: to messages that were unanswered when nsqd read it. Whatever was unanswered then counts for
// itself, and nsqd sent none beyond its RDY.
func (c *Conn) hold(answers int) {
	if c.takenRDY >= c.writtenRDY || int64(c.table.live+c.unwritten+answers) >= c.writtenRDY {
		return
	}
	now := monotonic()
	if now >= c.heldUntil {
		c.held = 0
	}
	c.held, c.heldUntil = max(c.held, c.writtenRDY), now+int64(c.holdTime())
}

// noteRoundTrip takes the time since start as one.
func (c *Conn) noteRoundTrip(start time.Time) {
	d := time.Since(start)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.roundTrip == 0 || d < c.roundTrip {
		c.roundTrip = d
	}
}

// ---- what rdyLoop sees

// view is what the RDY rules know of the connection, and when its next message expires (0: none does).
func (c *Conn) view() (v rdyView, deadline int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	deadline = c.table.nextDeadline()
	c.timed = deadline != 0
	wanted := c.wantRDY
	if c.clsQueued {
		wanted = 0
	}
	c.forgetProbes()
	var probe uint64
	if n := len(c.probes); n > 0 {
		probe = c.table.get(c.probes[n-1]).period
	}
	if c.held > 0 && monotonic() >= c.heldUntil {
		c.held = 0
	}
	v = rdyView{
		closing:     c.closing.Load(),
		written:     max(c.writtenRDY, c.takenRDY),
		taken:       c.takenRDY,
		wanted:      wanted,
		unanswered:  int64(c.table.live + c.unwritten),
		peak:        int64(c.peak),
		received:    c.fresh,
		probe:       probe,
		lastMessage: instant(c.lastRead),
		holdTime:    c.holdTime(),
	}
	if c.held > 0 {
		v.held, v.heldUntil = c.held, instant(c.heldUntil)
	}
	return v, deadline
}

// forgetProbes forgets those that are unanswered no more.
func (c *Conn) forgetProbes() {
	c.probes = slices.DeleteFunc(c.probes, func(ref deliveryRef) bool { return c.table.get(ref) == nil })
}

// follow says what rdyLoop wants to be told of, and whether its look at demand is over. It returns how many messages
// are unanswered at this moment.
func (c *Conn) follow(watched, lent, measured bool) (unanswered int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watched, c.lent = watched, lent
	if measured {
		if c.fresh == 0 {
			c.table.release()
		}
		c.peak, c.fresh, c.noted = c.table.live, 0, false
	}
	return int64(c.table.live + c.unwritten)
}

// settle tells who closes the connection if nothing is left to do.
func (c *Conn) settle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settleLocked()
}

func (c *Conn) settleLocked() {
	if !c.closing.Load() || c.table.live > 0 || c.unwritten > 0 {
		return
	}
	select {
	case c.settled <- struct{}{}:
	default:
	}
}
