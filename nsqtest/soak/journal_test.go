package soak

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
)

// journal takes what happens in a consumer, in order.
type journal interface {
	write(e event)
}

type eventKind byte

const (
	eventBegun    eventKind = 'B' // a handler has a message
	eventTouched  eventKind = 'T'
	eventEnded    eventKind = 'E' // a handler has decided; written before the consumer knows
	eventAnswered eventKind = 'A' // the FIN or REQ is being written
	eventClosed   eventKind = 'C' // a connection has ended; text: "lost", "closed" after CLS, "failed" before it was subscribed
	// With "closed", number is how many messages were not answered before.
	eventViolation eventKind = 'V' // something that must not be
	eventStopped   eventKind = 'S' // the consumer has stopped; text: how, and what the tap has seen
)

// event is one entry. Times are nanoseconds since 1970, since several processes write them.
type event struct {
	kind     eventKind
	at       int64
	seq      int // of the handling, from 1 in each consumer
	number   int // of the message
	attempts uint16
	id       string
	nsqd     string // address
	conn     int
	read     int64  // when the message came
	text     string // outcome, command, or words
}

func (e event) String() string {
	return fmt.Sprintf("%c %d %d %d %d %s %s %d %d %q\n", e.kind, e.at, e.seq, e.number, e.attempts, orDash(e.id), orDash(e.nsqd), e.conn, e.read, e.text)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func parseEvent(line string) (e event, err error) {
	fields := strings.SplitN(line, " ", 10)
	if len(fields) != 10 || len(fields[0]) != 1 {
		return e, fmt.Errorf("not an event: %q", line)
	}
	number := func(s string) int64 {
		n, convErr := strconv.ParseInt(s, 10, 64)
		if convErr != nil {
			err = convErr
		}
		return n
	}
	e = event{
		kind:     eventKind(fields[0][0]),
		at:       number(fields[1]),
		seq:      int(number(fields[2])),
		number:   int(number(fields[3])),
		attempts: uint16(number(fields[4])),
		id:       fields[5],
		nsqd:     fields[6],
		conn:     int(number(fields[7])),
		read:     number(fields[8]),
	}
	text, quoteErr := strconv.Unquote(fields[9])
	if quoteErr != nil {
		err = quoteErr
	}
	e.text = text
	return e, err
}

// fileJournal appends to a file, with one write for each event: what is written survives a SIGKILL.
type fileJournal struct {
	mu   sync.Mutex // guards file
	file *os.File
}

func openFileJournal(path string) (*fileJournal, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	return &fileJournal{file: f}, err
}

func (j *fileJournal) write(e event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, err := j.file.WriteString(e.String()); err != nil {
		panic(err) // the ledger would be wrong
	}
}

// journalReader reads what another process appends.
type journalReader struct {
	file    *os.File
	partial []byte
	buf     []byte
}

func openJournalReader(path string) (*journalReader, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	return &journalReader{file: f, buf: make([]byte, 64<<10)}, err
}

// read hands on all complete events that have been appended since the last call.
func (r *journalReader) read(take func(event)) error {
	for {
		n, err := r.file.Read(r.buf)
		r.partial = append(r.partial, r.buf[:n]...)
		for {
			line, rest, ok := bytes.Cut(r.partial, []byte("\n"))
			if !ok {
				break
			}
			e, err := parseEvent(string(line))
			if err != nil {
				return err
			}
			take(e)
			r.partial = rest
		}
		if n == 0 || err != nil {
			return nil
		}
	}
}
