package soak

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// What the ledger allows for, on a machine that may be busy.
const (
	// onItsWay is how long an answer may be between a consumer's socket and nsqd's hands: an nsqd that didn't get to run for more than
	// a second has been seen.
	onItsWay = 2 * time.Second
	// aftermath is how long after a fault a connection may still be lost by it: nsqd's and our own silence of two heartbeats.
	aftermath = 2*heartbeatInterval + slack
	// retireAfter is when the history of a finished message is checked for good and forgotten.
	retireAfter = time.Minute
)

// ledger keeps book of what becomes of each message, and of what was done to nsqds, links and consumers. All methods may be called
// from several goroutines. Times are nanoseconds since 1970, as in events.
type ledger struct {
	start time.Time
	nsqds []string // by index: the addresses that consumers know
	loud  bool     // show violations at once

	mu         sync.Mutex // guards the fields below
	numbers    [][]entry  // by number, in chunks
	next       int
	accepted   int
	finished   int // of the accepted ones
	handlings  map[int][]*handling
	books      map[string]*book
	faults     map[string][]*fault // by address
	story      []string            // what was done, in order
	violations []string
	causes     map[string]int // of messages that were handled again
	lost       []int          // see conclude
	tapped     tapStats       // sums, and the worst, of consumers that were stopped in order
}

// entry is what is kept of each message for good.
type entry struct {
	nsqd     uint8
	accepted bool   // nsqd has confirmed it
	finished bool   // a handler has
	retired  bool   // its history is checked and gone
	at       uint32 // when it was offered to nsqd, in milliseconds since the start
}

const chunk = 4096

// book is what one consumer, from its start to its end, has told.
type book struct {
	name      string
	handlings map[int]*handling // by seq, those that may still change
	conns     map[int]closure   // by number, those that have ended
	killed    int64
	closed    int64 // when the consumer had ended; 0: it runs
}

type closure struct {
	at  int64
	how string
}

// handling is one call of a handler.
type handling struct {
	book     *book
	seq      int
	conn     int
	nsqd     string
	id       string
	attempts uint16
	read     int64
	begun    int64
	touched  int64 // last
	ended    int64
	outcome  outcome
	answered int64
	answer   string
}

// fault is something that was done to an nsqd or to the link to it, and for how long.
type fault struct {
	what     string
	from, to int64 // to: 0 while it lasts
	stop     bool  // nsqd ended, in order
	kill     bool  // nsqd ended, not in order
	ended    int64 // when nsqd had
}

func newLedger(nsqds []string) *ledger {
	return &ledger{
		start:     time.Now(),
		nsqds:     nsqds,
		handlings: make(map[int][]*handling),
		books:     make(map[string]*book),
		faults:    make(map[string][]*fault),
		causes:    make(map[string]int),
	}
}

// offer hands out the next n numbers for an nsqd.
func (l *ledger) offer(nsqd, n int) (first int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first = l.next
	for l.next < first+n {
		if l.next%chunk == 0 {
			l.numbers = append(l.numbers, make([]entry, chunk))
		}
		*l.entry(l.next) = entry{nsqd: uint8(nsqd), at: uint32(time.Since(l.start).Milliseconds())}
		l.next++
	}
	return first
}

func (l *ledger) entry(number int) *entry { return &l.numbers[number/chunk][number%chunk] }

// accept notes that nsqd has confirmed n messages. Without it nsqd may have them or not.
func (l *ledger) accept(first, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := first; i < first+n; i++ {
		e := l.entry(i)
		e.accepted = true
		if e.finished {
			l.finished++
		}
	}
	l.accepted += n
}

// backlog is how many accepted messages no handler has finished.
func (l *ledger) backlog() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.accepted - l.finished
}

func (l *ledger) acceptedSoFar() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.accepted
}

// tell adds a line to the story.
func (l *ledger) tell(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tellLocked(format, args...)
}

func (l *ledger) tellLocked(format string, args ...any) {
	l.story = append(l.story, fmt.Sprintf("%8s  %s", l.clock(time.Now().UnixNano()), fmt.Sprintf(format, args...)))
	if len(l.story) > 2000 { // of a run of half an hour the end will do
		l.story = slices.Clone(l.story[1000:])
	}
}

// clock writes a time as seconds since the start.
func (l *ledger) clock(at int64) string {
	if at == 0 {
		return "never"
	}
	return fmt.Sprintf("%.3fs", time.Unix(0, at).Sub(l.start).Seconds())
}

// fail notes something that must not be.
func (l *ledger) fail(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(format, args...)
}

func (l *ledger) failLocked(format string, args ...any) {
	text := fmt.Sprintf("%8s  %s", l.clock(time.Now().UnixNano()), fmt.Sprintf(format, args...))
	l.violations = append(l.violations, text)
	if l.loud && len(l.violations) <= shownAtOnce {
		fmt.Println(text) // a long run need not end to be known as failed
	}
}

// shownAtOnce is how many violations are shown when they are noticed.
const shownAtOnce = 10

// beginFault is called before something is done to an nsqd or its link.
func (l *ledger) beginFault(nsqd int, f *fault) *fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.from = time.Now().UnixNano()
	addr := l.nsqds[nsqd]
	l.faults[addr] = append(l.faults[addr], f)
	l.tellLocked("nsqd %d: %s", nsqd, f.what)
	return f
}

// ended is called when an nsqd has.
func (l *ledger) ended(f *fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.ended = time.Now().UnixNano()
}

// endFault is called when all is well again.
func (l *ledger) endFault(nsqd int, f *fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.to = time.Now().UnixNano()
	l.tellLocked("nsqd %d: no more %s", nsqd, f.what)
}

// openBook begins a consumer's.
func (l *ledger) openBook(name string) *book {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := &book{name: name, handlings: make(map[int]*handling), conns: make(map[int]closure)}
	l.books[name] = b
	return b
}

// killed notes that a consumer is about to be killed.
func (l *ledger) killed(b *book) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.killed = time.Now().UnixNano()
}

// closeBook ends a consumer's.
func (l *ledger) closeBook(b *book) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.closed = time.Now().UnixNano()
}

// bookJournal is the journal of a consumer in this process.
type bookJournal struct {
	ledger *ledger
	book   *book
}

func (j bookJournal) write(e event) { j.ledger.enter(j.book, e) }

// enter takes in what a consumer tells.
func (l *ledger) enter(b *book, e event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch e.kind {
	case eventBegun:
		l.begun(b, e)
	case eventTouched:
		if h := b.handlings[e.seq]; h != nil {
			h.touched = e.at
		}
	case eventEnded:
		h := b.handlings[e.seq]
		if h == nil {
			l.failLocked("%s: the end of a handling that never began: %s", b.name, e)
			return
		}
		h.ended, h.outcome = e.at, outcome(e.text)
		if number := e.number; h.outcome == finished && number >= 0 && number < l.next {
			if n := l.entry(number); !n.finished {
				n.finished = true
				if n.accepted {
					l.finished++
				}
			}
		}
	case eventAnswered:
		if h := b.handlings[e.seq]; h != nil {
			h.answered, h.answer = e.at, e.text
			delete(b.handlings, e.seq)
		}
	case eventClosed:
		b.conns[e.conn] = closure{e.at, e.text}
		switch {
		case l.troubled(e.nsqd, e.at-int64(aftermath), e.at+int64(onItsWay)):
		case e.text == "lost":
			l.failLocked("%s: connection %d to %s was lost without a cause at %s", b.name, e.conn, e.nsqd, l.clock(e.at))
		case e.text == "closed" && e.number > 0:
			l.failLocked("%s: connection %d to %s was closed at %s with %d messages unanswered", b.name, e.conn, e.nsqd, l.clock(e.at), e.number)
		}
	case eventViolation:
		l.failLocked("%s: %s", b.name, e.text)
	case eventStopped:
		l.tellLocked("%s: %s", b.name, e.text)
		var stats tapStats
		if _, text, _ := strings.Cut(e.text, ": "); json.Unmarshal([]byte(text), &stats) != nil {
			l.failLocked("%s: no statistics: %q", b.name, e.text)
		}
		l.tapped.add(stats)
	}
}

func (l *ledger) begun(b *book, e event) {
	h := &handling{
		book: b, seq: e.seq, conn: e.conn, nsqd: e.nsqd, id: e.id, attempts: e.attempts, read: e.read, begun: e.at,
	}
	b.handlings[e.seq] = h
	if e.number < 0 || e.number >= l.next {
		l.failLocked("%s: a handler has number %d, which was never published", b.name, e.number)
		return
	}
	n := l.entry(e.number)
	if want := l.nsqds[n.nsqd]; want != e.nsqd {
		l.failLocked("%s: message %d comes from %s and was published to %s", b.name, e.number, e.nsqd, want)
	}
	if n.retired {
		l.failLocked("%s: message %d is handled again (attempt %d), long after it was finished", b.name, e.number, e.attempts)
	}
	l.handlings[e.number] = append(l.handlings[e.number], h)
}

// troubled tells whether a fault of an nsqd touches the time from one moment to another.
func (l *ledger) troubled(nsqd string, from, to int64) bool { return l.trouble(nsqd, from, to) != nil }

func (l *ledger) trouble(nsqd string, from, to int64) *fault {
	for _, f := range slices.Backward(l.faults[nsqd]) {
		if f.from <= to && (f.to == 0 || f.to >= from) {
			return f
		}
	}
	return nil
}

// explain says why a message was handled again after p, "" if there is no cause.
func (l *ledger) explain(p, next *handling) string {
	if p.outcome == requeued {
		return "requeued"
	}
	closed, how := p.book.conns[p.conn].at, p.book.conns[p.conn].how
	if p.book.killed != 0 && closed == 0 {
		closed, how = p.book.killed, "killed"
	}
	// The answer of a graceful close is expected to arrive.
	if how == "lost" || how == "killed" {
		if p.answered == 0 || closed-p.answered <= int64(onItsWay) {
			return map[string]string{"lost": "connection lost", "killed": "consumer killed"}[how]
		}
	}
	deadline := max(p.read, p.touched) + int64(msgTimeout)
	switch {
	case p.answered != 0 && p.answered >= deadline-int64(onItsWay):
		return "timeout"
	case p.answered == 0 && (p.ended == 0 && next.begun >= deadline-int64(onItsWay) || p.ended >= deadline-int64(onItsWay)):
		return "timeout"
	}
	until := p.answered
	if until == 0 {
		until = next.begun
	}
	if l.trouble(p.nsqd, p.read-int64(onItsWay), until+int64(onItsWay)) != nil {
		return "nsqd or link in trouble"
	}
	for _, f := range l.faults[p.nsqd] {
		if f.kill && f.from >= p.read && f.from <= next.begun {
			return "nsqd killed" // it remembers an older state of its disk
		}
	}
	return ""
}

// checkAgain checks that a message was handled again for causes only.
func (l *ledger) checkAgain(number int) {
	hs := l.handlings[number]
	if len(hs) < 2 {
		return
	}
	slices.SortStableFunc(hs, func(a, b *handling) int {
		return cmp.Or(cmp.Compare(a.attempts, b.attempts), cmp.Compare(a.begun, b.begun))
	})
	for i, next := range hs[1:] {
		p := hs[i]
		cause := l.explain(p, next)
		if p.attempts == next.attempts && cause != "nsqd killed" && !l.everKilled(p.nsqd) {
			l.failLocked("message %d was handled twice in one delivery:\n%s", number, l.history(number))
		} else if cause == "" {
			l.failLocked("message %d was handled again (attempt %d) without a cause:\n%s", number, next.attempts, l.history(number))
		}
		l.causes[cause]++
	}
}

func (l *ledger) everKilled(nsqd string) bool {
	return slices.ContainsFunc(l.faults[nsqd], func(f *fault) bool { return f.kill })
}

// history is all that is known of a message.
func (l *ledger) history(number int) string {
	e := l.entry(number)
	var s strings.Builder
	fmt.Fprintf(&s, "    published to nsqd %d at %.3fs, confirmed: %t", e.nsqd, float64(e.at)/1000, e.accepted)
	for _, h := range l.handlings[number] {
		fmt.Fprintf(&s, "\n    attempt %d in %s over connection %d, ID %s: read %s, begun %s, touched %s, %s %s, %s %s",
			h.attempts, h.book.name, h.conn, h.id, l.clock(h.read), l.clock(h.begun), l.clock(h.touched),
			cmp.Or(string(h.outcome), "ended"), l.clock(h.ended), cmp.Or(h.answer, "answered"), l.clock(h.answered))
		if c, ok := h.book.conns[h.conn]; ok {
			fmt.Fprintf(&s, "; connection %s %s", c.how, l.clock(c.at))
		}
		if h.book.killed != 0 {
			fmt.Fprintf(&s, "; consumer killed %s", l.clock(h.book.killed))
		}
	}
	for _, f := range l.faults[l.nsqds[e.nsqd]] {
		if near := int64(10 * time.Second); len(l.handlings[number]) == 0 || f.from < l.handlings[number][0].begun+near && (f.to == 0 || f.to > l.handlings[number][0].read-near) {
			fmt.Fprintf(&s, "\n    nsqd %d: %s from %s to %s", e.nsqd, f.what, l.clock(f.from), l.clock(f.to))
		}
	}
	return s.String()
}

// retire checks and forgets the history of messages that were finished some time ago.
func (l *ledger) retire(age time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := time.Now().Add(-age).UnixNano()
	for number, hs := range l.handlings {
		e := l.entry(number)
		last := int64(0)
		for _, h := range hs {
			last = max(last, h.begun, h.ended, h.answered)
		}
		if e.finished && last < before {
			l.checkAgain(number)
			e.retired = true
			delete(l.handlings, number)
		}
	}
	for _, b := range l.books {
		maps.DeleteFunc(b.handlings, func(_ int, h *handling) bool { return h.ended != 0 && h.ended < before })
	}
	maps.DeleteFunc(l.books, func(_ string, b *book) bool { return b.closed != 0 && b.closed < before })
	for addr, faults := range l.faults {
		l.faults[addr] = slices.DeleteFunc(faults, func(f *fault) bool {
			return f.to != 0 && f.to < before-int64(retireAfter) && !f.kill && !f.stop
		})
	}
}

// missing returns the numbers that nsqd has confirmed and no handler has finished.
func (l *ledger) missing() (numbers []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.accepted == l.finished {
		return nil
	}
	for number := range l.next {
		if e := l.entry(number); e.accepted && !e.finished {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// inTheHands is how many messages an nsqd that ends in order may lose: one for each connection, one for the topic, and some REQs.
const inTheHands = 10

// conclude checks everything, when nsqds have nothing left.
func (l *ledger) conclude() {
	missing := l.missing()
	l.retire(0)
	l.mu.Lock()
	defer l.mu.Unlock()
	for number := range l.handlings { // not confirmed and not finished, or missing
		l.checkAgain(number)
	}
	stops := make(map[uint8]int)
	for i, addr := range l.nsqds {
		for _, f := range l.faults[addr] {
			if f.stop {
				stops[uint8(i)]++
			}
		}
	}
	lost := make(map[uint8]int)
	for _, number := range missing {
		e := l.entry(number)
		if !l.endedAfter(e) {
			l.failLocked("message %d was never handled:\n%s", number, l.history(number))
			continue
		}
		l.lost = append(l.lost, number)
		lost[e.nsqd]++
	}
	for nsqd, n := range lost {
		if most := stops[nsqd] * inTheHands; n > most && !l.everKilled(l.nsqds[nsqd]) {
			l.failLocked("%d messages of nsqd %d were never handled, and it may have lost %d at most, having been restarted %d times", n, nsqd, most, stops[nsqd])
			for _, number := range l.lost[:min(len(l.lost), 5)] {
				l.failLocked("message %d was never handled:\n%s", number, l.history(number))
			}
		}
	}
}

// endedAfter tells whether the nsqd of a message has ended after it was given the message.
func (l *ledger) endedAfter(e *entry) bool {
	offered := l.start.Add(time.Duration(e.at) * time.Millisecond).UnixNano()
	return slices.ContainsFunc(l.faults[l.nsqds[e.nsqd]], func(f *fault) bool {
		return (f.stop || f.kill) && f.ended >= offered
	})
}

// report is the failures with what is needed to understand them, "" if there are none.
func (l *ledger) report() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.violations) == 0 {
		return ""
	}
	shown := l.violations[:min(len(l.violations), 30)]
	return fmt.Sprintf("what was done:\n%s\n\n%d violations:\n%s", strings.Join(l.story, "\n"), len(l.violations), strings.Join(shown, "\n"))
}
