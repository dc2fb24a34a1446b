package soak

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A script makes a ledger of one message of one nsqd, which two consumers handle. Times are milliseconds after scriptStart.
type script struct {
	*ledger
	a, b *book
}

// scriptStart leaves room for what has happened before.
const scriptStart = 100_000

func newScript() *script {
	s := &script{ledger: newLedger([]string{"nsqd", "other"})}
	s.a, s.b = s.openBook("a"), s.openBook("b")
	s.accept(s.offer(0, 1), 1)
	return s
}

func (s *script) at(ms int) int64 {
	return s.start.Add(time.Duration(scriptStart+ms) * time.Millisecond).UnixNano()
}

// handle is a handling from its delivery to its answer, each of which may be missing.
func (s *script) handle(b *book, attempts uint16, read, ended int, o outcome, answered int) {
	seq := len(b.handlings) + int(attempts)*10
	s.enter(b, event{kind: eventBegun, seq: seq, number: 0, nsqd: "nsqd", conn: 1, attempts: attempts, read: s.at(read), at: s.at(read + 1)})
	if ended > 0 {
		s.enter(b, event{kind: eventEnded, seq: seq, number: 0, at: s.at(ended), text: string(o)})
	}
	if answered > 0 {
		s.enter(b, event{kind: eventAnswered, seq: seq, at: s.at(answered), text: "FIN"})
	}
}

func (s *script) fault(nsqd string, from, to int, f fault) {
	f.from, f.to, f.ended = s.at(from), s.at(to), s.at(from)
	s.faults[nsqd] = append(s.faults[nsqd], &f)
}

func TestLedgerConcludes(t *testing.T) {
	again := func(s *script) { s.handle(s.b, 2, 5000, 5010, finished, 5011) }
	cases := map[string]struct {
		do     func(s *script)
		want   string // in the first violation; empty: none
		causes map[string]int
	}{
		"handled once":   {do: func(s *script) { s.handle(s.a, 1, 10, 20, finished, 21) }},
		"never handled":  {want: "message 0 was never handled", do: func(s *script) {}},
		"never finished": {want: "message 0 was never handled", do: func(s *script) { s.handle(s.a, 1, 10, 20, requeued, 21) }},
		"never handled, though another nsqd was killed": {want: "message 0 was never handled", do: func(s *script) {
			s.fault("other", 100, 200, fault{kill: true})
		}},
		"never handled, though nsqd was killed before": {want: "message 0 was never handled", do: func(s *script) {
			s.fault("nsqd", -scriptStart-1, 0, fault{kill: true})
		}},
		"never handled, since nsqd was killed":  {do: func(s *script) { s.fault("nsqd", 100, 200, fault{kill: true}) }},
		"never handled, and nsqd was restarted": {do: func(s *script) { s.fault("nsqd", 100, 200, fault{stop: true}) }},
		"too many were never handled, and nsqd was restarted": {want: "it may have lost 10 at most", do: func(s *script) {
			s.accept(s.offer(0, inTheHands), inTheHands)
			s.fault("nsqd", 100, 200, fault{stop: true})
		}},
		"again without a cause": {want: "handled again (attempt 2) without a cause", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			again(s)
		}},
		"again after a requeue": {causes: map[string]int{"requeued": 1}, do: func(s *script) {
			s.handle(s.a, 1, 10, 20, requeued, 21)
			again(s)
		}},
		"again after the timeout": {causes: map[string]int{"timeout": 1}, do: func(s *script) {
			s.handle(s.a, 1, 10, 3500, finished, 0)
			again(s)
		}},
		"again after a late answer": {causes: map[string]int{"timeout": 1}, do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 2900)
			again(s)
		}},
		"again, though the answer was in time": {want: "without a cause", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 900)
			again(s)
		}},
		"again, though it was touched": {want: "without a cause", do: func(s *script) {
			s.enter(s.a, event{kind: eventBegun, seq: 1, nsqd: "nsqd", conn: 1, attempts: 1, read: s.at(10), at: s.at(10)})
			s.enter(s.a, event{kind: eventTouched, seq: 1, at: s.at(2900)})
			s.enter(s.a, event{kind: eventEnded, seq: 1, at: s.at(3500), text: string(finished)})
			s.enter(s.a, event{kind: eventAnswered, seq: 1, at: s.at(3500), text: "FIN"})
			again(s)
		}},
		"again after its consumer was killed": {causes: map[string]int{"consumer killed": 1}, do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.a.killed = s.at(22)
			again(s)
		}},
		"again, though its consumer was killed much later": {want: "without a cause", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.a.killed = s.at(3000)
			again(s)
		}},
		"again after its connection was lost": {causes: map[string]int{"connection lost": 1}, do: func(s *script) {
			s.fault("nsqd", -3000, -2000, fault{})
			s.handle(s.a, 1, 10, 20, finished, 0)
			s.enter(s.a, event{kind: eventClosed, conn: 1, nsqd: "nsqd", at: s.at(15), text: "lost"})
			again(s)
		}},
		"again, though its connection was closed in order": {want: "without a cause", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.enter(s.a, event{kind: eventClosed, conn: 1, nsqd: "nsqd", at: s.at(22), text: "closed"})
			again(s)
		}},
		"again, though another connection was lost": {want: "without a cause", do: func(s *script) {
			s.fault("nsqd", -3000, -2000, fault{})
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.enter(s.a, event{kind: eventClosed, conn: 2, nsqd: "nsqd", at: s.at(22), text: "lost"})
			again(s)
		}},
		"again after trouble": {causes: map[string]int{"nsqd or link in trouble": 1}, do: func(s *script) {
			s.fault("nsqd", 500, 900, fault{})
			s.handle(s.a, 1, 10, 20, finished, 21)
			again(s)
		}},
		"again after trouble elsewhere": {want: "without a cause", do: func(s *script) {
			s.fault("other", 0, 900, fault{})
			s.handle(s.a, 1, 10, 20, finished, 21)
			again(s)
		}},
		"again after trouble before and after": {want: "without a cause", do: func(s *script) {
			s.fault("nsqd", -3000, -2100, fault{})
			s.fault("nsqd", 2100, 3000, fault{})
			s.handle(s.a, 1, 10, 20, finished, 21)
			again(s)
		}},
		"twice in one delivery": {want: "twice in one delivery", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, requeued, 21)
			s.handle(s.b, 1, 10, 20, finished, 21)
		}},
		"a connection is lost without a cause": {want: "was lost without a cause", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.enter(s.a, event{kind: eventClosed, conn: 1, nsqd: "nsqd", at: s.at(5000), text: "lost"})
		}},
		"a connection is closed in order with messages unanswered": {want: "with 2 messages unanswered", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.enter(s.a, event{kind: eventClosed, conn: 1, nsqd: "nsqd", at: s.at(5000), text: "closed", number: 2})
		}},
		"a connection that is closed in order is lost before": {do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.fault("nsqd", 4900, 5000, fault{})
			s.enter(s.a, event{kind: eventClosed, conn: 1, nsqd: "nsqd", at: s.at(5000), text: "closed", number: 2})
		}},
		"a number that was never published": {want: "was never published", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.enter(s.a, event{kind: eventBegun, seq: 1, number: 1, nsqd: "nsqd"})
		}},
		"a message of another nsqd": {want: "was published to", do: func(s *script) {
			s.enter(s.a, event{kind: eventBegun, seq: 1, number: 0, nsqd: "other", attempts: 1})
			s.handle(s.a, 2, 10, 20, finished, 21)
		}},
		"again long after": {want: "long after it was finished", do: func(s *script) {
			s.handle(s.a, 1, 10, 20, finished, 21)
			s.retire(-time.Hour)
			again(s)
		}},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			s := newScript()
			test.do(s)
			s.conclude()
			if test.want == "" {
				require.Empty(t, s.violations)
			} else {
				require.NotEmpty(t, s.violations)
				require.Contains(t, s.violations[0], test.want)
				require.Contains(t, s.report(), test.want)
			}
			if test.causes != nil {
				require.Equal(t, test.causes, s.causes)
			}
		})
	}
}

// TestJournalKeepsEvents: what one process writes is what the other reads.
func TestJournalKeepsEvents(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	written := []event{
		{kind: eventBegun, at: 5, seq: 6, number: 7, attempts: 8, id: "0123456789abcdef", nsqd: "127.0.0.1:4150", conn: 9, read: 10, text: "-"},
		{kind: eventViolation, at: 1, id: "-", nsqd: "-", text: "several words,\n\"two lines\""},
	}
	j, err := openFileJournal(path)
	require.NoError(t, err)
	defer j.file.Close()
	r, err := openJournalReader(path)
	require.NoError(t, err)
	defer r.file.Close()
	r.buf = make([]byte, 7) // so that events come in pieces
	var got []event
	take := func(e event) { got = append(got, e) }
	for i, e := range written {
		j.write(e)
		require.NoError(t, r.read(take))
		require.Equal(t, written[:i+1], got)
	}
	_, err = j.file.WriteString("B 1 2\n")
	require.NoError(t, err)
	require.ErrorContains(t, r.read(take), "not an event")
}

// TestPlanIsReplayed: the same seed draws the same steps, in each lane of its own.
func TestPlanIsReplayed(t *testing.T) {
	draw := func(seed uint64, name string) (numbers []uint64) {
		r := newSeededRand(seed, name)
		for range 10 {
			numbers = append(numbers, r.Uint64())
		}
		return numbers
	}
	require.Equal(t, draw(1, "nsqd 0"), draw(1, "nsqd 0"))
	require.NotEqual(t, draw(1, "nsqd 0"), draw(1, "nsqd 1"))
	require.NotEqual(t, draw(1, "nsqd 0"), draw(2, "nsqd 0"))
}
