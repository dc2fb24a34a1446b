package soak

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rdyloop/nsq"
)

// What the tap allows for, since it and the library look at their clocks at different moments, on a machine that may be busy.
const (
	// noticed is by when the library has acted on something: a new limit, a lost connection, a message beyond RDY.
	noticed = time.Second
	// written is by when the answer of a handler is on the wire.
	written = 3 * time.Second
	// expiryMargin is how much earlier than the library the tap takes a message for expired.
	expiryMargin = 250 * time.Millisecond
)

// clockFormat is for reports.
const clockFormat = "05.000"

// outcome is what a handler did with a message.
type outcome string

const (
	pending  outcome = ""
	finished outcome = "finished"
	requeued outcome = "requeued" // also by an error or a panic
)

// delivery is a message that came over a connection.
type delivery struct {
	conn      *tapConn
	id        string
	attempts  uint16
	number    int // -1: a body that is none of ours
	read      time.Time
	deadline  time.Time // when nsqd takes it back
	straggler bool      // it came beyond RDY, which had been lowered

	seq     int       // of the handling; 0: no handler has begun
	ended   time.Time // of the handling
	outcome outcome
	taken   bool      // its answer is being written
	older   *delivery // of the same ID on the same connection, which this one superseded
}

// tap sees every byte of a consumer at its own sockets, keeps count of what is unanswered, and reports what must not be. It counts in
// the consumer's favour where the order of two things can't be told.
type tap struct {
	journal journal
	timeout time.Duration // of messages

	mu       sync.Mutex // guards the fields below
	conns    map[*tapConn]bool
	numConns int
	seq      int
	byKey    map[deliveryKey]*delivery // the latest; gone when answered
	closed   []*tapConn                // lost lately, with deliveries in byKey
	limits   []limit                   // max-in-flight over time, the present one last
	suspects []*suspect
	stats    tapStats
	ticked   time.Time     // when the last tick came
	stalled  time.Duration // how late ticks were lately
}

// tapStats are for people.
type tapStats struct {
	Deliveries int
	Raises     int // of RDY
	Late       int // answers that nsqd refused
	Stragglers int // messages that came beyond RDY, which had been lowered
	Most       int // messages unanswered beyond max-in-flight, for stragglers, at the worst moment
}

func (s *tapStats) add(o tapStats) {
	s.Deliveries += o.Deliveries
	s.Raises += o.Raises
	s.Late += o.Late
	s.Stragglers += o.Stragglers
	s.Most = max(s.Most, o.Most)
}

type deliveryKey struct {
	nsqd     string
	id       string
	attempts uint16
}

type limit struct {
	n     int
	since time.Time
}

// suspect is a RDY that seems too high. It is not if a connection that it counts turns out to be lost already.
type suspect struct {
	at     time.Time
	excess int
	parts  map[*tapConn]int
	text   string
}

func newTap(j journal, timeout time.Duration, maxInFlight int) *tap {
	return &tap{
		journal: j,
		timeout: timeout,
		conns:   make(map[*tapConn]bool),
		byKey:   make(map[deliveryKey]*delivery),
		limits:  []limit{{n: maxInFlight, since: time.Now()}},
	}
}

// tickEvery is how often tick is to be called.
const tickEvery = 20 * time.Millisecond

// tick notices when this process, or the tap itself, stands still: on a machine with too much to do, that is nothing the
// library could help.
func (t *tap) tick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	elapsed := now.Sub(t.ticked)
	// What was lost counts for a while, as it is seen in what began before.
	t.stalled = max(0, t.stalled-elapsed/8)
	if late := elapsed - tickEvery; !t.ticked.IsZero() && late > 5*tickEvery {
		t.stalled += late
	}
	t.ticked = now
}

// noticed is by when the library has acted on something, reckoning with the time that it had.
func (t *tap) noticed() time.Duration {
	d := noticed + t.stalled
	if late := time.Since(t.ticked) - tickEvery; !t.ticked.IsZero() && late > 5*tickEvery {
		d += late // the next tick will tell
	}
	return d
}

// setLimit is told of a new max-in-flight before the consumer is.
func (t *tap) setLimit(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.limits = append(t.limits, limit{n, time.Now()})
}

// limit returns the highest max-in-flight that may still be in effect.
func (t *tap) limit(now time.Time) int {
	// What was replaced long ago doesn't count; what replaced it does.
	for len(t.limits) > 1 && now.Sub(t.limits[1].since) > t.noticed() {
		t.limits = t.limits[1:]
	}
	most := 0
	for _, l := range t.limits {
		most = max(most, l.n)
	}
	return most
}

// open is how many connections are.
func (t *tap) open() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.conns)
}

// dial is a Config.Dial.
func (t *tap) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return t.add(nc.(*net.TCPConn), addr), nil
}

func (t *tap) add(nc *net.TCPConn, addr string) *tapConn {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.numConns++
	c := &tapConn{TCPConn: nc, tap: t, nsqd: addr, number: t.numConns, unanswered: make(map[string]*delivery), answered: make(map[string]string)}
	t.conns[c] = true
	return c
}

// tapConn is a connection of a consumer to an nsqd.
type tapConn struct {
	*net.TCPConn
	tap    *tap
	nsqd   string
	number int

	// Guarded by tap.mu.
	in, out    []byte // of incomplete frames and commands
	magic      bool   // has been sent
	subscribed bool
	closing    bool // CLS has been sent
	rdy        int
	highest    []limit              // RDY over time, the present one last
	unanswered map[string]*delivery // by ID
	answered   map[string]string    // lately, by ID: when and what, for reports
	writing    bool
	arrived    int       // messages since the present or last write began
	hungUp     time.Time // when the writing side was closed; zero: it is open
	closedAt   time.Time // zero: it is open
}

// Read hands on what nsqd sends once it has been entered.
func (c *tapConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	if n > 0 {
		c.tap.mu.Lock()
		c.in = append(c.in, p[:n]...)
		c.takeFrames(time.Now())
		c.tap.mu.Unlock()
	}
	return n, err
}

func (c *tapConn) takeFrames(now time.Time) {
	for len(c.in) >= 8 {
		size := int(binary.BigEndian.Uint32(c.in))
		if len(c.in) < 4+size {
			return
		}
		kind, data := binary.BigEndian.Uint32(c.in[4:]), c.in[8:4+size]
		switch int32(kind) {
		case nsq.FrameTypeMessage:
			c.takeMessage(data, now)
		case nsq.FrameTypeError:
			c.takeError(string(data))
		}
		c.in = c.in[4+size:]
	}
	if len(c.in) == 0 {
		c.in = nil
	}
}

func (c *tapConn) takeMessage(data []byte, now time.Time) {
	t := c.tap
	m, err := nsq.DecodeMessage(data)
	if err != nil {
		t.report("connection %d: %v", c.number, err)
		return
	}
	d := &delivery{conn: c, id: string(m.ID[:]), attempts: m.Attempts, number: numberOf(m.Body), read: now, deadline: now.Add(t.timeout)}
	if d.older = c.unanswered[d.id]; d.older != nil && d.older.taken { // nsqd has read its REQ while it is still being written
		t.forget(d.older)
		d.older = nil
	}
	c.unanswered[d.id] = d
	t.byKey[deliveryKey{c.nsqd, d.id, d.attempts}] = d
	t.stats.Deliveries++
	c.arrived++

	inFlight := c.inFlight(now.Add(noticed), false) // nsqd may have taken back some already
	if inFlight > c.rdy || c.closing {
		d.straggler = true
		t.stats.Stragglers++
	}
	if most := c.highestRDY(now); inFlight > most+1 {
		t.report("connection %d to %s: %d messages in flight, RDY was never above %d", c.number, c.nsqd, inFlight, most)
	}
	total := 0
	for other := range t.conns {
		total += other.inFlight(now, false)
	}
	t.stats.Most = max(t.stats.Most, total-t.limit(now))
}

// takeError reports all but late answers: nsqd complains of nothing else if the consumer does right.
func (c *tapConn) takeError(text string) {
	code, _, _ := strings.Cut(text, " ")
	switch code {
	case "E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED":
	default:
		c.tap.report("connection %d to %s: nsqd says %q", c.number, c.nsqd, text)
		return
	}
	c.tap.stats.Late++
	if code != "E_TOUCH_FAILED" {
		return
	}
	for word := range strings.FieldsSeq(text) { // the message has been taken back
		if c.unanswered[word] != nil {
			delete(c.unanswered, word)
			c.answered[word] = text + " at " + time.Now().Format(clockFormat)
		}
	}
}

// inFlight counts messages that are unanswered, not yet expired at that time; with taken also those whose answer is just being written.
func (c *tapConn) inFlight(at time.Time, taken bool) (n int) {
	for _, d := range c.unanswered {
		if (taken || !d.taken) && at.Before(d.deadline.Add(-expiryMargin)) {
			n++
		}
	}
	return n
}

// highestRDY is the highest RDY that a message which comes now can have been sent under.
func (c *tapConn) highestRDY(now time.Time) int {
	for len(c.highest) > 1 && now.Sub(c.highest[1].since) > 10*time.Second {
		c.highest = c.highest[1:]
	}
	most := 0
	for _, l := range c.highest {
		most = max(most, l.n)
	}
	return most
}

// Write enters what makes nsqd send more ahead of the write, and what makes it send less after it.
func (c *tapConn) Write(p []byte) (int, error) {
	c.tap.mu.Lock()
	c.out = append(c.out, p...)
	commands := c.takeCommands()
	now := time.Now()
	for _, cmd := range commands {
		c.before(cmd, now)
	}
	c.writing, c.arrived = true, 0
	c.tap.mu.Unlock()

	n, err := c.TCPConn.Write(p)

	c.tap.mu.Lock()
	defer c.tap.mu.Unlock()
	c.writing = false
	if err == nil {
		for _, cmd := range commands {
			c.after(cmd)
		}
	}
	return n, err
}

// takeCommands returns the complete commands, without what follows IDENTIFY.
func (c *tapConn) takeCommands() (commands [][]string) {
	if !c.magic {
		rest, ok := bytes.CutPrefix(c.out, []byte("  V2"))
		if !ok {
			return nil
		}
		c.magic, c.out = true, rest
	}
	for {
		line, rest, ok := bytes.Cut(c.out, []byte("\n"))
		if !ok {
			break
		}
		words := strings.Split(string(line), " ")
		if words[0] == "IDENTIFY" {
			if len(rest) < 4 || len(rest)-4 < int(binary.BigEndian.Uint32(rest)) {
				break
			}
			rest = rest[4+binary.BigEndian.Uint32(rest):]
		}
		commands = append(commands, words)
		c.out = rest
	}
	if len(c.out) == 0 {
		c.out = nil
	}
	return commands
}

func (c *tapConn) before(words []string, now time.Time) {
	switch words[0] {
	case "FIN", "REQ":
		c.answer(words[0], words[1], now)
	case "TOUCH":
		if d := c.unanswered[words[1]]; d != nil {
			d.deadline = now.Add(c.tap.timeout)
		}
	case "RDY":
		n, err := strconv.Atoi(words[1])
		if err != nil {
			c.tap.report("connection %d: RDY %q", c.number, words[1])
			return
		}
		c.highest = append(c.highest, limit{n, now})
		if n > c.rdy {
			c.rdy = n
			c.tap.checkRaise(c, now)
		}
	}
}

// answer checks that a FIN or REQ belongs to a delivery of this connection, the first answer to it, and what the handler wanted.
func (c *tapConn) answer(command, id string, now time.Time) {
	t := c.tap
	d := c.unanswered[id]
	if d == nil || d.taken {
		t.report("connection %d to %s: %s %s answers nothing that came over this connection and is unanswered; before: %s",
			c.number, c.nsqd, command, id, cmp.Or(c.answered[id], "nothing"))
		return
	}
	d.taken = true
	if len(c.answered) > 1000 {
		clear(c.answered)
	}
	c.answered[id] = fmt.Sprintf("%s of attempt %d, read %s, answered %s", command, d.attempts, d.read.Format(clockFormat), now.Format(clockFormat))
	handled := d // whose handler has decided
	for handled != nil && handled.outcome == pending {
		handled = handled.older
	}
	switch {
	case command == "FIN" && (handled == nil || handled.outcome != finished):
		t.report("connection %d to %s: FIN %s of message %d, which no handler has finished", c.number, c.nsqd, id, d.number)
	case command == "REQ" && d.outcome == finished:
		t.report("connection %d to %s: REQ %s of message %d, which a handler has finished", c.number, c.nsqd, id, d.number)
	case command == "REQ" && d.outcome == pending && d.seq != 0:
		t.report("connection %d to %s: REQ %s of message %d, which a handler has", c.number, c.nsqd, id, d.number)
	}
	if handled != nil {
		t.journal.write(event{kind: eventAnswered, seq: handled.seq, at: now.UnixNano(), text: command})
	}
}

func (c *tapConn) after(words []string) {
	switch words[0] {
	case "SUB":
		c.subscribed = true
	case "FIN", "REQ":
		d := c.unanswered[words[1]]
		if d == nil || !d.taken { // it has come again meanwhile
			return
		}
		delete(c.unanswered, words[1])
		for ; d != nil; d = d.older {
			c.tap.forget(d)
		}
	case "CLS":
		c.closing, c.rdy = true, 0
	case "RDY":
		if n, err := strconv.Atoi(words[1]); err == nil && !c.closing {
			c.rdy = n
		}
	}
}

func (t *tap) forget(d *delivery) {
	key := deliveryKey{d.conn.nsqd, d.id, d.attempts}
	if t.byKey[key] == d {
		delete(t.byKey, key)
	}
}

// reserved is how much of max-in-flight the connection takes: its RDY, or what is unanswered if that is more. A message that came
// beyond RDY a moment ago may not have been counted yet when it was decided what to write; and one that comes while answers are
// being written shows that nsqd has one of them.
func (c *tapConn) reserved(now time.Time) int {
	n := c.inFlight(now, true)
	n -= min(c.arrived, n-c.inFlight(now, false))
	for _, d := range c.unanswered {
		if d.straggler && now.Sub(d.read) < noticed && now.Before(d.deadline.Add(-expiryMargin)) {
			n--
		}
	}
	return max(c.rdy, n)
}

// ages writes values with how long ago each was set.
func ages(limits []limit, now time.Time) string {
	var s []string
	for _, l := range limits {
		s = append(s, fmt.Sprintf("%d for %dms", l.n, now.Sub(l.since).Milliseconds()))
	}
	return strings.Join(s, ", ")
}

func (t *tap) checkRaise(raised *tapConn, now time.Time) {
	t.stats.Raises++
	s := &suspect{at: now, parts: make(map[*tapConn]int)}
	var text strings.Builder
	for c := range t.conns {
		n := c.reserved(now)
		s.excess += n
		s.parts[c] = n
		fmt.Fprintf(&text, "\n  connection %d to %s: %d reserved, RDY %s; closing %t, writing %t; in flight (* came beyond RDY):",
			c.number, c.nsqd, n, ages(c.highest, now), c.closing, c.writing)
		var reads []string
		for _, d := range c.unanswered {
			star := ""
			if d.straggler {
				star = "*"
			}
			reads = append(reads, fmt.Sprintf("%s%d", star, now.Sub(d.read).Milliseconds()))
		}
		slices.Sort(reads)
		fmt.Fprintf(&text, " since ms %v", reads)
	}
	limit := t.limit(now)
	s.excess -= limit
	if s.excess > 0 {
		s.text = fmt.Sprintf("RDY %d on connection %d is beyond the max-in-flight of %d (%s):%s",
			raised.rdy, raised.number, limit, ages(t.limits, now), text.String())
		t.suspects = append(t.suspects, s)
	}
}

// CloseWrite is after the last answer.
func (c *tapConn) CloseWrite() error {
	c.tap.mu.Lock()
	c.hungUp = time.Now()
	c.tap.mu.Unlock()
	return c.TCPConn.CloseWrite()
}

// forgotten counts the messages that should have been answered before the connection was closed in order.
func (c *tapConn) forgotten(now time.Time) (n int) {
	end := now
	if !c.hungUp.IsZero() {
		end = c.hungUp
	}
	for _, d := range c.unanswered {
		if !d.taken && d.read.Before(end.Add(-expiryMargin)) && end.Before(d.deadline.Add(-expiryMargin)) {
			n++
		}
	}
	return n
}

// Close ends what the connection counts for.
func (c *tapConn) Close() error {
	c.tap.closeConn(c)
	return c.TCPConn.Close()
}

func (t *tap) closeConn(c *tapConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !c.closedAt.IsZero() {
		return
	}
	now := time.Now()
	c.closedAt = now
	delete(t.conns, c)
	t.closed = append(t.closed, c)
	for _, s := range t.suspects {
		if now.Sub(s.at) < noticed {
			s.excess -= s.parts[c]
		}
	}
	t.suspects = slices.DeleteFunc(t.suspects, func(s *suspect) bool { return s.excess <= 0 })
	how, forgotten := "lost", 0
	switch {
	case !c.subscribed:
		how = "failed"
	case c.closing:
		how, forgotten = "closed", c.forgotten(now)
	}
	t.journal.write(event{kind: eventClosed, conn: c.number, number: forgotten, nsqd: c.nsqd, at: now.UnixNano(), text: how})
}

// begin enters that a handler has a message.
func (t *tap) begin(m *nsq.Message) *delivery {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.byKey[deliveryKey{m.NSQDAddress, string(m.ID[:]), m.Attempts}]
	if d == nil {
		t.report("a handler has message %d (ID %s, attempt %d), which never came or was answered already", numberOf(m.Body), m.ID[:], m.Attempts)
		d = &delivery{conn: &tapConn{nsqd: m.NSQDAddress}, id: string(m.ID[:]), attempts: m.Attempts, number: numberOf(m.Body), read: now}
	} else {
		switch c := d.conn; {
		case d.seq != 0:
			t.report("a second handler has message %d, attempt %d", d.number, d.attempts)
		case !c.closedAt.IsZero() && now.Sub(c.closedAt) > t.noticed():
			t.report("a handler has message %d, whose connection was closed %s ago", d.number, now.Sub(c.closedAt))
		case now.After(d.deadline.Add(t.noticed())):
			t.report("a handler has message %d, which has expired %s ago", d.number, now.Sub(d.deadline))
		}
	}
	t.seq++
	d.seq = t.seq
	t.journal.write(event{
		kind: eventBegun, seq: d.seq, number: d.number, nsqd: d.conn.nsqd, conn: d.conn.number, attempts: d.attempts, id: d.id,
		read: d.read.UnixNano(), at: now.UnixNano(),
	})
	return d
}

// touched enters that a handler wants more time for its message.
func (t *tap) touched(d *delivery) {
	t.journal.write(event{kind: eventTouched, seq: d.seq, at: time.Now().UnixNano()})
}

// end enters what a handler is about to decide.
func (t *tap) end(d *delivery, o outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.ended, d.outcome = time.Now(), o
	t.journal.write(event{kind: eventEnded, seq: d.seq, number: d.number, at: d.ended.UnixNano(), text: string(o)})
	if !d.conn.closedAt.IsZero() {
		t.forget(d)
	}
}

// sweep looks for what didn't happen. It is to be called now and then.
func (t *tap) sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	rdy := 0
	for c := range t.conns {
		if c.writing {
			continue // nsqd doesn't read, so what it should know waits
		}
		rdy += c.rdy
		for id, d := range c.unanswered {
			if !d.taken && d.outcome != pending && now.Sub(d.ended) > written && d.ended.Before(d.deadline.Add(-expiryMargin)) {
				t.report("connection %d to %s: the answer to message %d, which was %s %s ago, was never written",
					c.number, c.nsqd, d.number, d.outcome, now.Sub(d.ended))
				delete(c.unanswered, id)
			}
		}
	}
	if limit := t.limit(now); rdy > limit {
		t.report("the RDY of all connections is %d, and max-in-flight is %d", rdy, limit)
	}
	t.suspects = slices.DeleteFunc(t.suspects, func(s *suspect) bool {
		if now.Sub(s.at) < noticed {
			return false
		}
		t.report("%s", s.text)
		return true
	})
	t.closed = slices.DeleteFunc(t.closed, func(c *tapConn) bool {
		if now.Sub(c.closedAt) < 10*time.Second {
			return false
		}
		maps.DeleteFunc(t.byKey, func(_ deliveryKey, d *delivery) bool { return d.conn == c })
		return true
	})
}

func (t *tap) report(format string, args ...any) {
	t.journal.write(event{kind: eventViolation, at: time.Now().UnixNano(), text: fmt.Sprintf(format, args...)})
}
