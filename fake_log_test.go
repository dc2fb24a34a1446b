package nsq

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeKind says what a log entry is about.
type fakeKind int

const (
	entryDialed   fakeKind = iota + 1 // Dial was called; Line says how it went unless a connection came of it
	entryOpened                       // a connection was accepted
	entryClosed                       // a connection is closed; Line tells why
	entryCommand                      // a command was read: Line, and Body where the command has one
	entryResponse                     // a response frame was sent: Line
	entryError                        // an error frame was sent: Line
	entryMessage                      // a message was sent: ID, Attempts, Body
	entryRaw                          // bytes or a frame outside the protocol were sent: Body
	entryExpired                      // a message in flight timed out: ID. nsqd says nothing to the client
)

// fakeEntry is something that happened at a fake nsqd. Entries are in the order in which the fakes' state changed, so
// walking through them is walking through what nsqd knew.
type fakeEntry struct {
	Seq  int // index in the log
	At   time.Time
	NSQD string // address
	Conn int    // number of the connection, counted over the cluster from 1; 0 for dials
	Kind fakeKind

	Line     string // the command as read, text of a response or error, reason
	Body     []byte
	ID       string
	Attempts uint16

	// RDY and InFlight are those of the connection after the entry. (A command that onCommand or a delayed step may
	// still stop is logged before it takes effect.)
	RDY      int64
	InFlight int
}

// words splits a command line: "FIN 3030…" gives "FIN" and the id.
func (e fakeEntry) words() []string { return strings.Split(e.Line, " ") }

// name is the first word of Line, for example "FIN" or "E_FIN_FAILED".
func (e fakeEntry) name() string { return e.words()[0] }

func (e fakeEntry) String() string {
	what := ""
	switch e.Kind {
	case entryDialed:
		what = "dialed " + e.Line
	case entryOpened:
		what = "opened"
	case entryClosed:
		what = "closed: " + e.Line
	case entryCommand:
		what = "<- " + e.Line
	case entryResponse, entryError:
		what = "-> " + e.Line
	case entryMessage:
		what = fmt.Sprintf("-> message %s attempts %d", e.ID, e.Attempts)
	case entryRaw:
		what = fmt.Sprintf("-> raw %q", e.Body[:min(len(e.Body), 40)])
	case entryExpired:
		what = "timed out " + e.ID
	}
	return fmt.Sprintf("%s %s #%d rdy %d in flight %d  %s", e.At.Format("15:04:05.000"), e.NSQD, e.Conn, e.RDY, e.InFlight, what)
}

// fakeLog is the one ordered record of a cluster. Its lock guards the state of all fakes too: what happened and that it
// was written down are one step.
type fakeLog struct {
	t        testing.TB
	patience time.Duration // how long waits last before they fail the test

	mu      sync.Mutex // guards the fields below, and the fakes; never held while something is waited for
	entries []fakeEntry
	changed chan struct{}   // closed and replaced at each entry
	checker func(fakeEntry) // called for each entry with mu held
}

// setChecker has check called for every entry from now on, in order and under the log's lock: it must not call methods
// of cluster, fakes or connections. t.Errorf is fine, t.FailNow isn't, since it runs in the fakes' goroutines.
func (l *fakeLog) setChecker(check func(fakeEntry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checker = check
}

// appendLocked writes e down and wakes those who wait for it.
func (l *fakeLog) appendLocked(e fakeEntry) {
	e.Seq, e.At = len(l.entries), time.Now()
	l.entries = append(l.entries, e)
	if l.checker != nil {
		l.checker(e)
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// withoutLock runs do, which may take the lock itself, in the middle of something that holds it.
func (l *fakeLog) withoutLock(do func()) {
	l.mu.Unlock()
	defer l.mu.Lock()
	do()
}

// snapshot returns the entries so far that match all filters.
func (l *fakeLog) snapshot(filters ...func(fakeEntry) bool) []fakeEntry {
	found, _ := l.since(0, filters)
	return found
}

// since returns the entries from seq on that match all filters, and the seq of the next entry to come.
func (l *fakeLog) since(seq int, filters []func(fakeEntry) bool) (found []fakeEntry, next int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries[seq:] {
		if !slices.ContainsFunc(filters, func(matches func(fakeEntry) bool) bool { return !matches(e) }) {
			found = append(found, e)
		}
	}
	return found, len(l.entries)
}

// byNSQD, byConn and byKind are filters for snapshot and waitEntry.
func byNSQD(addr string) func(fakeEntry) bool {
	return func(e fakeEntry) bool { return e.NSQD == addr }
}

func byConn(number int) func(fakeEntry) bool {
	return func(e fakeEntry) bool { return e.Conn == number }
}

func byKind(kinds ...fakeKind) func(fakeEntry) bool {
	return func(e fakeEntry) bool { return slices.Contains(kinds, e.Kind) }
}

// byLine matches commands, responses, errors and reasons by the beginning of their text.
func byLine(prefix string) func(fakeEntry) bool {
	return func(e fakeEntry) bool { return strings.HasPrefix(e.Line, prefix) }
}

// commands returns the lines of the commands that the nsqd at addr has read, over all its connections, as "SUB t c" or
// "RDY 5". Commands whose first word is in except are left out; heartbeat answers ("NOP") often are.
func (l *fakeLog) commands(addr string, except ...string) []string {
	return fakeCommandLines(l.snapshot(byNSQD(addr)), except)
}

func fakeCommandLines(entries []fakeEntry, except []string) []string {
	lines := []string{}
	for _, e := range entries {
		if e.Kind == entryCommand && !slices.Contains(except, e.name()) {
			lines = append(lines, e.Line)
		}
	}
	return lines
}

// waitEntry returns the first entry, past or to come, that matches all filters. It is for the test's own goroutine, and
// fails the test when it has waited for too long.
func (l *fakeLog) waitEntry(filters ...func(fakeEntry) bool) fakeEntry {
	l.t.Helper()
	return l.waitEntries(1, filters...)[0]
}

// waitEntries returns the first n entries that match all filters, as soon as there are n.
func (l *fakeLog) waitEntries(n int, filters ...func(fakeEntry) bool) []fakeEntry {
	l.t.Helper()
	var found []fakeEntry
	next := 0
	l.waitUntil(func() bool {
		var more []fakeEntry
		more, next = l.since(next, filters)
		found = append(found, more...)
		return len(found) >= n
	})
	return found[:n]
}

// waitUntil returns once cond holds. cond is asked now and after each entry, in the caller's goroutine and without any
// lock, so it may call all methods. It is for the test's own goroutine, and fails the test when it has waited for too long.
func (l *fakeLog) waitUntil(cond func() bool) {
	l.t.Helper()
	timeout := time.NewTimer(l.patience)
	defer timeout.Stop()
	for {
		changed := l.nextChange()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-timeout.C:
			l.t.Fatalf("fake nsqd: waited %v in vain; the log ends with\n%s", l.patience, l.tail(40))
		}
	}
}

func (l *fakeLog) nextChange() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// tail returns the last n entries as text, for people who look for the cause of a failure.
func (l *fakeLog) tail(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var text strings.Builder
	for _, e := range l.entries[max(0, len(l.entries)-n):] {
		fmt.Fprintln(&text, e)
	}
	return text.String()
}
