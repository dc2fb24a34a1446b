package nsq

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The model test drives a consumer over six fake nsqds at random and checks the promises about RDY and backoff. It
// prints its seed; `go test -run TestModel -model.seed N` goes the same way again, as far as goroutines let it.
var (
	modelSeed  = flag.Uint64("model.seed", 0, "seed of the first run of TestModel; 0: a random one")
	modelSteps = flag.Int("model.steps", fewer(10_000), "steps per run of TestModel")
	modelRuns  = flag.Int("model.runs", 1, "runs of TestModel, with consecutive seeds")
)

func TestModel(t *testing.T) {
	t.Parallel()
	seed := *modelSeed
	if seed == 0 {
		seed = rand.Uint64N(1e9)
	}
	for i := range *modelRuns {
		seed := seed + uint64(i)
		ok := t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Logf("run again with -run TestModel -model.seed %d", seed)
			synctest.Test(t, func(t *testing.T) { newModel(t, seed).run(*modelSteps) })
		})
		if !ok {
			return
		}
	}
}

// model is what an onlooker knows who sees the log of the fakes and the client's end of each connection: every write of
// commands when it begins and when it is over, and every message that the client reads. All of that is one order, kept
// by the log's lock.
//
// What the client has reserved is judged at its own end, since a fake may read commands seconds after they were
// written. A message that nsqd sent by an RDY that was written over meanwhile, was on its way: the model lets it pass as a
// stray, but a raise that is decided later than it arrived has to reckon with it.
type model struct {
	*fakeCluster
	t      *testing.T
	r      *Consumer
	random *rand.Rand // of the steps
	nodes  []*fakeNSQD
	calls  sync.WaitGroup // of ConnectToNSQD

	// guarded by the log's lock
	conns       map[int]*modelConn
	maxInFlight int64
	debt        int64          // what the sum may still be, after max-in-flight was lowered
	level       int            // of backoff, by the log lines
	probes      int            // raises since the last step of backoff
	steps       int            // of backoff
	stepped     time.Time      // when the last one was
	trace       [200]modelNote // the last things that happened, the n-th at n modulo its size
	notes       int
	failed      bool
	counts      map[string]int

	// owned by run
	idleSince    time.Time // budget has been free and unused since
	silentSince  time.Time // no probe since
	hungrySince  time.Time // a connection has had no RDY since, though others can spare some
	raisesSeen   int
	probingSince time.Time // by the looks after steps
	stepsSeen    int       // of backoff, at the last look

	mu      sync.Mutex // guards the fields below
	choice  *rand.Rand // of handlers
	failing float64
	holding float64
	slow    time.Duration
}

// modelConn is a connection as seen from the client's end.
type modelConn struct {
	node       *fakeNSQD
	number     int
	half       *fakeHalf // what the client writes to
	maxRDY     int64
	subscribed bool
	closing    bool                     // CLS is written
	answering  map[string]*modelMessage // the messages when the present write began
	again      int                      // messages that came again while a write was stuck: answers to the first may wait behind it
	raised     time.Time                // when RDY was raised last
	written    int64
	last       int64 // RDY last sent, be it still being written
	highest    int64 // of written and what is being written
	writing    bool
	began      time.Time // the write that is going on, or the last one
	ended      time.Time // the last one
	decided    time.Time // the earliest time that what is written now can have been decided at
	input      []byte    // read by the client, less than a frame
	messages   map[string]*modelMessage
	rdy        int64 // as nsqd has it
	inFlight   int   // as nsqd has it
}

// modelMessage is a message that was sent and not answered.
type modelMessage struct {
	sent     time.Time
	arrived  time.Time // zero: not yet
	deadline time.Time // by the client's reckoning; zero: it has not arrived
	stray    bool
	single   bool // sent by RDY 1 of the present period of backoff
	gone     bool // nsqd has given it up
}

const (
	modelMsgTimeout = 5 * time.Second
	modelInterval   = 2 * time.Second // rdy_redistribute_interval
	modelMaxBackoff = 2 * time.Second
)

func newModel(t *testing.T, seed uint64) *model {
	m := &model{
		fakeCluster: newFakeCluster(t),
		t:           t,
		random:      rand.New(rand.NewPCG(seed, 1)),
		choice:      rand.New(rand.NewPCG(seed, 2)),
		conns:       map[int]*modelConn{},
		counts:      map[string]int{},
		maxInFlight: 4,
	}
	for i := range 6 {
		n := m.add(fmt.Sprintf("nsqd-%d:4150", i+1))
		m.nodes = append(m.nodes, n)
		n.set(func(b *fakeBehaviour) { b.msgTimeout = modelMsgTimeout })
	}
	m.setChecker(m.entry)
	m.r = newTestConsumer(t, m.fakeCluster, func(cfg *Config) {
		cfg.Dial = m.dial
		cfg.MaxInFlight = int(m.maxInFlight)
		cfg.MaxAttempts = 0
		cfg.DefaultRequeueDelay = 0
		cfg.BackoffMultiplier = 25 * time.Millisecond
		cfg.MaxBackoffDuration = modelMaxBackoff
		cfg.RDYRedistributeInterval = modelInterval
		cfg.WriteTimeout = 10 * time.Second
	})
	m.r.SetLogger(modelLogger{m}, LogLevelWarning)
	m.r.AddConcurrentHandlers(HandlerFunc(m.handle), 24)
	return m
}

// ---- what the model sees

// modelNote is a line of what happened: an entry of the log, or something else.
type modelNote struct {
	at     time.Time
	entry  fakeEntry
	format string
	args   []any
}

func (n modelNote) String() string {
	text := fmt.Sprintf(n.format, n.args...)
	if n.format == "" {
		_, text, _ = strings.Cut(n.entry.String(), " ")
	}
	return n.at.Format("15:04:05.000000 ") + text
}

// note keeps the last lines of what happened.
func (m *model) note(format string, args ...any) {
	m.trace[m.notes%len(m.trace)] = modelNote{at: time.Now(), format: format, args: args}
	m.notes++
}

func (m *model) noteEntry(e fakeEntry) {
	m.trace[m.notes%len(m.trace)] = modelNote{at: e.At, entry: e}
	m.notes++
}

func (m *model) tail() string {
	var text strings.Builder
	for i := max(0, m.notes-len(m.trace)); i < m.notes; i++ {
		fmt.Fprintln(&text, m.trace[i%len(m.trace)])
	}
	return text.String()
}

// violated fails the test, once, with what led there.
func (m *model) violated(format string, args ...any) {
	if m.failed {
		return
	}
	m.failed = true
	m.t.Errorf("%s\nmax-in-flight %d, %s\nwhat happened:\n%s", fmt.Sprintf(format, args...),
		m.maxInFlight, m.describe(), m.tail())
}

func (m *model) describe() string {
	var text strings.Builder
	for _, c := range m.sorted() {
		fmt.Fprintf(&text, "\n  #%d %s: written %d, highest %d, unanswered %d (%d of them strays or given up), nsqd: rdy %d in flight %d, writing %t closing %t",
			c.number, c.node.addr, c.written, c.highest, c.open(), c.open()-c.core(), c.rdy, c.inFlight, c.writing, c.closing)
	}
	return text.String()
}

func (m *model) sorted() []*modelConn {
	var conns []*modelConn
	for _, c := range m.conns {
		conns = append(conns, c)
	}
	slices.SortFunc(conns, func(a, b *modelConn) int { return a.number - b.number })
	return conns
}

// entry is called for each entry of the log.
func (m *model) entry(e fakeEntry) {
	if e.Kind != entryDialed {
		m.noteEntry(e)
	}
	c := m.conns[e.Conn]
	if c != nil {
		c.rdy, c.inFlight = e.RDY, e.InFlight
	}
	switch {
	case e.Kind == entryOpened:
		n := m.nsqds[e.NSQD]
		for _, fake := range n.conns {
			if fake.number == e.Conn {
				m.conns[e.Conn] = &modelConn{
					node: n, number: e.Conn, half: fake.raw.(*fakeStream).in, maxRDY: n.behaviour.maxRDY,
					messages: map[string]*modelMessage{},
				}
			}
		}
	case c == nil:
	case e.Kind == entryClosed:
		delete(m.conns, e.Conn)
	case e.Kind == entryMessage:
		stray := int64(c.core())+1 > c.highest
		if c.messages[e.ID] != nil && c.writing {
			c.again++
		}
		c.messages[e.ID] = &modelMessage{sent: e.At, stray: stray, single: c.highest == 1 && !c.raised.Before(m.stepped)}
		m.counts["messages"]++
		if stray {
			m.counts["strays"]++
		}
	case e.Kind == entryExpired:
		if msg := c.messages[e.ID]; msg != nil {
			msg.gone = true
		}
		m.counts["expired"]++
	}
	m.check()
}

// core counts the unanswered messages of c that were sent within its RDY.
func (c *modelConn) core() int {
	n := 0
	for _, msg := range c.messages {
		if !msg.stray && !msg.gone && !msg.expired() {
			n++
		}
	}
	return n
}

// expired tells whether the client has given the message up. A fake that has read a TOUCH late waits longer.
func (msg *modelMessage) expired() bool {
	return !msg.arrived.IsZero() && !msg.deadline.After(time.Now())
}

// open counts the messages that the client has or will read, and may answer.
func (c *modelConn) open() int {
	n := 0
	for _, msg := range c.messages {
		if !msg.expired() {
			n++
		}
	}
	return n
}

// known counts the unanswered messages of c that the client knew of before at.
func (c *modelConn) known(at time.Time) int64 {
	n := int64(0)
	for _, msg := range c.messages {
		if !msg.arrived.IsZero() && msg.arrived.Before(at) && !msg.expired() {
			n++
		}
	}
	return n
}

// check is promise 5, at every entry of the log and at each write: nothing but strays and what max-in-flight was
// before it was lowered exceeds it.
func (m *model) check() {
	var sum int64
	for _, c := range m.conns {
		sum += max(c.highest, int64(c.core()))
	}
	if m.debt = min(m.debt, sum); sum > max(m.maxInFlight, m.debt) {
		m.violated("promise 5: %d reserved on the wire", sum)
	}
	m.counts["checks"]++
}

// checkRaise is promise 5 from the side of him who decides: a raise reckons with every message that arrived before.
func (m *model) checkRaise(c *modelConn, rdy int64) {
	sum := rdy
	for _, other := range m.conns {
		if other != c {
			sum += max(other.highest, other.known(c.decided))
		}
	}
	if sum > m.maxInFlight {
		m.violated("promise 5: RDY %d on #%d makes it %d", rdy, c.number, sum)
	}
	m.counts["raises"]++
}

// modelWire is the client's end of a connection.
type modelWire struct {
	*fakeStream
	m *model
	c *modelConn
}

func (m *model) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := m.fakeCluster.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w := &modelWire{fakeStream: nc.(*fakeStream), m: m}
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	for _, c := range m.conns {
		if c.half == w.out {
			w.c = c
		}
	}
	if w.c == nil { // closed already
		w.c = &modelConn{messages: map[string]*modelMessage{}}
	}
	return w, nil
}

func (w *modelWire) Write(p []byte) (int, error) {
	lines := strings.Split(string(p), "\n")
	w.locked(func() { w.m.writeBegins(w.c, lines) })
	n, err := w.fakeStream.Write(p)
	w.locked(func() { w.m.writeEnds(w.c, lines, err) })
	return n, err
}

func (w *modelWire) Read(p []byte) (int, error) {
	n, err := w.fakeStream.Read(p)
	w.locked(func() {
		w.m.clientRead(w.c, p[:n])
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			delete(w.m.conns, w.c.number)
		}
	})
	return n, err
}

func (w *modelWire) Close() error {
	w.locked(func() {
		w.m.note("#%d closed by the client", w.c.number)
		delete(w.m.conns, w.c.number)
	})
	return w.fakeStream.Close()
}

func (w *modelWire) locked(do func()) {
	w.m.fakeLog.mu.Lock()
	defer w.m.fakeLog.mu.Unlock()
	do()
}

func (m *model) writeBegins(c *modelConn, lines []string) {
	now := time.Now()
	if !c.ended.Equal(now) {
		c.decided = now
	} // else: it may have been decided while the write before was stuck
	c.writing, c.began = true, now
	c.answering = maps.Clone(c.messages)
	for _, line := range lines {
		switch command, arg, _ := strings.Cut(line, " "); command {
		case "RDY":
			m.note("#%d writes %s", c.number, line)
			rdy, err := strconv.ParseInt(arg, 10, 64)
			if err != nil || rdy < 0 || rdy > c.maxRDY {
				m.violated("promise 6: %s on #%d, which takes %d at most", line, c.number, c.maxRDY)
			}
			if rdy == c.last {
				m.violated("promise 9: %s again on #%d", line, c.number)
			}
			c.last, c.highest = rdy, max(c.highest, rdy)
			if rdy > c.written {
				m.checkRaise(c, rdy)
				c.raised = now
				m.probes++
			}
			m.counts["rdy"]++
		case "TOUCH":
			if msg := c.messages[arg]; msg != nil && c.decided.Add(modelMsgTimeout).After(msg.deadline) {
				msg.deadline = c.decided.Add(modelMsgTimeout)
			}
		}
	}
	m.check()
}

func (m *model) writeEnds(c *modelConn, lines []string, err error) {
	c.writing = false
	c.ended = time.Now()
	if c.began.Before(c.ended) {
		c.decided = c.began
	} else {
		c.again = 0
	}
	if err != nil {
		return // the connection ends
	}
	for _, line := range lines {
		switch command, arg, _ := strings.Cut(line, " "); command {
		case "RDY":
			rdy, _ := strconv.ParseInt(arg, 10, 64)
			c.setWritten(rdy)
			m.note("#%d has written %s", c.number, line)
		case "CLS":
			c.closing = true
			c.setWritten(0)
		case "FIN", "REQ":
			// After REQ 0 nsqd may have sent the message again before the write was over: that delivery stays.
			id, _, _ := strings.Cut(arg, " ")
			if c.messages[id] == c.answering[id] {
				delete(c.messages, id)
			}
			m.counts[command]++
		}
	}
	m.check()
}

// setWritten notes what nsqd is about to know. Messages that the client cannot have known of by now are strays.
func (c *modelConn) setWritten(rdy int64) {
	c.written, c.highest = rdy, rdy
	for _, msg := range c.messages {
		if msg.arrived.IsZero() || msg.arrived.Equal(time.Now()) {
			msg.stray = true
		}
	}
}

// clientRead looks for messages in what the client reads.
func (m *model) clientRead(c *modelConn, p []byte) {
	c.input = append(c.input, p...)
	for len(c.input) >= 8 {
		size := int(binary.BigEndian.Uint32(c.input))
		if len(c.input) < 4+size {
			return
		}
		frame := c.input[4 : 4+size]
		c.input = c.input[4+size:]
		switch binary.BigEndian.Uint32(frame) {
		case 0:
			if bytes.Equal(frame[4:], []byte("OK")) {
				c.subscribed = true
			}
		case 1: // E_TOUCH_FAILED and the like: the client learns that the message is gone
			for word := range strings.FieldsSeq(string(frame[4:])) {
				delete(c.messages, word)
			}
		case 2:
			if msg := c.messages[string(frame[4+10:4+26])]; msg != nil {
				msg.arrived, msg.deadline = time.Now(), time.Now().Add(modelMsgTimeout)
			}
		}
	}
}

// modelLogger hears of the steps of backoff.
type modelLogger struct{ m *model }

func (l modelLogger) Output(_ int, line string) error {
	m := l.m
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	level := 0
	if _, rest, ok := strings.Cut(line, "(backoff level "); ok {
		level, _ = strconv.Atoi(rest[:strings.Index(rest, ")")])
	} else if !strings.Contains(line, "exiting backoff") {
		return nil
	}
	m.note("backoff level %d", level)
	if m.level > 0 && m.probes == 0 {
		m.violated("promise 11: a step of backoff without a probe before it")
	}
	if level > m.level+1 || level < m.level-1 {
		m.violated("promise 11: from level %d to %d", m.level, level)
	}
	m.level, m.probes = level, 0
	m.steps++
	m.stepped = time.Now()
	return nil
}

// ---- what the model does

// handle does something with a message.
func (m *model) handle(msg *Message) error {
	m.mu.Lock()
	luck, how, slow := m.choice.Float64(), m.choice.Float64(), m.slow
	failing, holding := m.failing, m.holding
	if slow > 0 {
		slow = time.Duration(m.choice.Int64N(int64(slow)))
	}
	m.mu.Unlock()
	if luck < holding { // until it expires
		msg.DisableAutoResponse()
		return nil
	}
	if how < 0.1 && slow > 0 {
		for range 3 {
			time.Sleep(slow)
			msg.Touch()
		}
	}
	time.Sleep(slow)
	switch {
	case luck < holding+failing:
		return errRDYTest
	case how < 0.2:
		msg.RequeueWithoutBackoff(slow)
	}
	return nil
}

// behave changes what handlers do.
func (m *model) behave(failing, holding float64, slow time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failing, m.holding, m.slow = failing, holding, slow
}

func (m *model) changeMaxInFlight(n int) {
	synctest.Wait() // what is decided by the old value is written
	m.fakeLog.mu.Lock()
	m.note("max-in-flight %d", n)
	m.debt = 0
	for _, c := range m.conns {
		m.debt += max(c.highest, int64(c.core()))
	}
	m.maxInFlight = int64(n)
	m.fakeLog.mu.Unlock()
	m.r.ChangeMaxInFlight(n)
}

func (m *model) connect(n *fakeNSQD) {
	m.calls.Go(func() { _ = m.r.ConnectToNSQD(n.addr) })
}

// run makes the steps, with quiet points in between.
func (m *model) run(steps int) {
	m.t.Cleanup(func() {
		for _, n := range m.nodes {
			n.startReading()
			n.set(func(b *fakeBehaviour) { b.readDelay = 0 })
		}
		stopConsumer(m.t, m.r, 2*time.Minute)
		m.calls.Wait()
	})
	for _, n := range m.nodes[:3] {
		m.connect(n)
	}
	for i := 1; i <= steps && !m.over(); i++ {
		m.step()
		m.look()
		if i%1000 == 0 {
			m.quiet()
		}
	}
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	m.t.Logf("%d steps of backoff, %v", m.steps, m.counts)
}

func (m *model) over() bool {
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	return m.failed
}

// pick returns a random element.
func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// step does something at random and lets some time pass.
func (m *model) step() {
	n := pick(m.random, m.nodes...)
	note := func(format string, args ...any) {
		m.fakeLog.mu.Lock()
		defer m.fakeLog.mu.Unlock()
		m.note("%s: %s", n.addr, fmt.Sprintf(format, args...))
	}
	switch p := m.random.IntN(1000); {
	case p < 300:
		n.publishN(1 + m.random.IntN(3))
	case p < 340:
		m.connect(n)
	case p < 360:
		_ = m.r.DisconnectFromNSQD(n.addr)
	case p < 375:
		n.dropAll()
	case p < 385:
		n.closeAll()
	case p < 400:
		n.down()
	case p < 440:
		n.up()
	case p < 480:
		m.changeMaxInFlight(pick(m.random, 0, 1, 1, 2, 3, 4, 6, 8, 12))
	case p < 520:
		every := pick(m.random, 0, 0, 50*time.Millisecond, 300*time.Millisecond)
		if every == 0 {
			n.stopFlood()
		} else {
			n.flood(every)
		}
	case p < 540:
		d := pick(m.random, 0, 0, 3*time.Millisecond, time.Second, 3*time.Second)
		note("reads %s late", d)
		n.set(func(b *fakeBehaviour) { b.readDelay = d })
	case p < 560:
		d := pick(m.random, 10*time.Millisecond, time.Second, 4*time.Second, 12*time.Second)
		note("stops reading for %s", d)
		n.stopReadingFor(d)
	case p < 575:
		n.startReading()
	case p < 600:
		late, paused, stragglers := m.random.IntN(2) == 0, m.random.IntN(4) == 0, m.random.IntN(3)
		maxRDY, buffer := pick[int64](m.random, 2500, 2500, 2, 5), pick(m.random, 0, 0, 100, 64<<10)
		note("late %t, paused %t, %d stragglers, max RDY %d, buffer %d", late, paused, stragglers, maxRDY, buffer)
		n.set(func(b *fakeBehaviour) {
			b.lateLowered, b.paused, b.stragglers, b.socketBuffer = late, paused, stragglers, buffer
			if len(n.conns) == 0 {
				b.maxRDY = maxRDY
			}
		})
	case p < 630:
		m.behave(pick(m.random, 0, 0, 0.05, 0.3, 1), pick(m.random, 0, 0, 0, 0.05, 0.5),
			pick(m.random, 0, 0, 20*time.Millisecond, 200*time.Millisecond, 2*time.Second))
	case p < 635:
		n.expire()
	case p < 650:
		for range m.random.IntN(50) {
			time.Sleep(200 * time.Millisecond)
			m.look()
		}
	}
	if m.random.IntN(3) > 0 {
		time.Sleep(time.Duration(m.random.Int64N(int64(100 * time.Millisecond))))
	}
}

// look checks what must hold whenever nothing is in motion.
func (m *model) look() {
	synctest.Wait()
	status := m.r.Status()
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	now := time.Now()
	var free, offered, stuckOffered, highest int64
	var live, stuck, clear, hungry int
	free = m.maxInFlight
	for _, c := range m.conns {
		free -= max(c.highest, int64(c.open()))
		highest += c.highest
		switch {
		case c.writing:
			// Answers that wait behind a stuck write are not written, however long nsqd has given up the messages.
			// The same goes for a raise that was decided before anybody could know that the writer is stuck.
			asked := int64(0)
			for _, row := range status.NSQDs {
				if row.Address == c.node.addr {
					asked = row.RDY
				}
			}
			free -= max(c.highest, asked, int64(len(c.messages)+c.again)) - max(c.highest, int64(c.open()))
			stuck++
			stuckOffered += c.highest
		case c.subscribed && !c.closing:
			live++
			offered += c.written
			if c.written == 0 {
				hungry++
			}
			if c.open() == 0 {
				clear++
			}
			if m.maxInFlight == 0 && c.written > 0 {
				m.violated("promise 8: RDY %d on #%d while paused", c.written, c.number)
			}
		}
	}
	patience := joinBurstMax + 2*raiseRetry + time.Duration(stuck)*600*time.Millisecond
	for _, c := range m.conns {
		if c.writing { // it was stuck until just now, or will not be for long
			patience += 100 * time.Millisecond
		}
	}
	raised := m.counts["raises"] != m.raisesSeen
	m.raisesSeen = m.counts["raises"]
	lasts := func(since *time.Time, holds bool) bool {
		switch {
		case !holds:
			*since = time.Time{}
		case since.IsZero() || raised:
			*since = now
		}
		return holds && now.Sub(*since) > patience
	}
	if lasts(&m.hungrySince, status.BackoffLevel == 0 && stuck == 0 && hungry > 0 && int64(live) <= m.maxInFlight && highest >= m.maxInFlight) {
		m.violated("promise 6: a connection has no RDY though the budget is enough for all, since %s", m.hungrySince.Format("15:04:05.000"))
	}
	if lasts(&m.idleSince, status.BackoffLevel == 0 && free > 0 && live > 0 && offered == 0) {
		m.violated("promise 10: %d of the budget free and no RDY since %s", free, m.idleSince.Format("15:04:05.000"))
	}

	probing := status.BackoffLevel > 0 && status.BackoffProbing
	if !probing {
		m.probingSince = time.Time{}
	} else if m.probingSince.IsZero() || m.stepsSeen != m.steps {
		m.probingSince = now
	}
	m.stepsSeen = m.steps
	switch {
	case status.BackoffLevel == 0:
		m.silentSince = time.Time{}
		return
	case !status.BackoffProbing:
		m.silentSince = time.Time{}
		if offered > 0 {
			m.violated("promise 11: RDY %d while waiting", offered)
		}
		if left := status.BackoffUntil.Sub(now); left <= 0 || left > modelMaxBackoff {
			m.violated("promise 11: %s left to wait", left)
		}
		return
	}
	m.counts["looks at probes"]++
	if offered > 1 {
		m.violated("promise 11: RDY %d while probing", offered)
	}
	inFlight, perhaps := 0, 0
	for _, c := range m.conns {
		for _, msg := range c.messages {
			if msg.expired() || msg.arrived.IsZero() {
				continue
			}
			if msg.single && !msg.stray && !msg.gone && msg.sent.After(m.probingSince) {
				inFlight++
			}
			if !msg.sent.Before(m.stepped) {
				perhaps++
			}
		}
	}
	if inFlight > 1 {
		m.violated("promise 11: %d probes in flight", inFlight)
	}
	if lasts(&m.silentSince, free > 0 && clear > 0 && offered == 0 && stuckOffered == 0 && perhaps == 0) {
		m.violated("promise 11: no probe since %s", m.silentSince.Format("15:04:05.000"))
	}
}

// quiet ends all trouble and waits until nothing is left to do. Then all the budget must be where it belongs.
func (m *model) quiet() {
	m.fakeLog.mu.Lock()
	m.note("quiet")
	m.fakeLog.mu.Unlock()
	m.behave(0, 0, 0)
	for _, i := range m.random.Perm(len(m.nodes))[:2] {
		m.connect(m.nodes[i])
	}
	for _, n := range m.nodes {
		n.startReading()
		n.stopFlood()
		n.up()
		n.set(func(b *fakeBehaviour) { b.readDelay, b.lateLowered, b.paused, b.stragglers = 0, false, false, 0 })
	}
	m.changeMaxInFlight(1 + m.random.IntN(12))
	time.Sleep(30 * time.Second) // longer than messages, late reads and reconnects last
	for round := 0; m.r.Status().BackoffLevel > 0; round++ {
		if round == 100 {
			m.locked(func() { m.violated("promise 11: backoff does not end by successes") })
			return
		}
		for _, n := range m.nodes {
			n.publish("probe")
		}
		time.Sleep(5 * time.Second)
	}
	time.Sleep(time.Minute)
	m.rest(false)
	if m.over() {
		return
	}
	m.changeMaxInFlight(pick(m.random, 0, 1, 2, 5, 12))
	time.Sleep(joinBurstMax)
	m.rest(true)
}

func (m *model) locked(do func()) {
	m.fakeLog.mu.Lock()
	defer m.fakeLog.mu.Unlock()
	do()
}

// rest checks promises 6, 7 and 8 while nothing is in flight.
func (m *model) rest(turns bool) {
	synctest.Wait()
	m.look()
	var conns []*modelConn
	m.locked(func() {
		var caps []*rdyConn
		var rdy []int64
		for _, c := range m.sorted() {
			if c.open() > 0 || c.inFlight > 0 || len(c.node.queue) > 0 {
				m.violated("promise 10: #%d has messages at rest: %d known, %d in flight, %d waiting", c.number, c.open(), c.inFlight, len(c.node.queue))
			}
			if c.rdy != c.written {
				m.violated("the model is wrong about #%d", c.number)
			}
			if !c.subscribed || c.closing {
				m.violated("#%d is neither up nor gone", c.number)
			}
			conns = append(conns, c)
			caps = append(caps, &rdyConn{max: c.maxRDY})
			rdy = append(rdy, c.written)
		}
		if len(conns) == 0 {
			return
		}
		m.counts["rests"]++
		want := m.maxInFlight
		if int64(len(conns)) <= m.maxInFlight {
			want = rdySum(fairShares(m.maxInFlight, caps, func(c *rdyConn) int64 { return c.max }))
		}
		// Where nsqd was slow while connecting, there is a pause between two turns.
		var held int64
		for _, c := range conns {
			if int64(len(conns)) > m.maxInFlight && c.written == 0 && time.Since(c.ended) <= maxHold {
				held++
			}
		}
		if sum := rdySum(rdy); sum > want || sum+held < want {
			m.violated("promise 6: RDY %v at rest, %d just lowered", rdy, held)
		}
		for i, c := range conns {
			if rdy[i] < c.maxRDY && rdy[i] < slices.Max(rdy)-1 {
				m.violated("promise 6: unfair RDY %v at rest", rdy)
			}
		}
	})
	if !turns || m.over() || m.maxInFlight == 0 || int64(len(conns)) <= m.maxInFlight {
		return
	}
	// Promise 7: everybody gets a turn.
	had := map[*modelConn]bool{}
	limit := time.Duration((int64(len(conns))+m.maxInFlight-1)/m.maxInFlight)*500*time.Millisecond + 100*time.Millisecond
	for start := time.Now(); time.Since(start) < limit; time.Sleep(10 * time.Millisecond) {
		synctest.Wait()
		m.locked(func() {
			for _, c := range conns {
				had[c] = had[c] || c.written > 0
			}
		})
	}
	m.locked(func() {
		if len(had) < len(conns) || slices.ContainsFunc(conns, func(c *modelConn) bool { return !had[c] }) {
			m.violated("promise 7: not everybody had a turn within %s", limit)
		}
	})
}
