package nsq

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bareNSQD is the client's end of a connection to an nsqd that does little more than honour RDY: while fewer messages
// than RDY are unanswered, it sends. It has neither a log nor a goroutine, and once it is subscribed to it allocates
// nothing, so that what is counted or measured is the client's. What the client does is tested with fakeNSQD.
type bareNSQD struct {
	linkTime time.Duration // how long a write lasts
	// windowed has messages come by the window: RDY of them at once, and the next ones when all of these are answered.
	windowed bool

	frames   [][]byte      // of messages; they are sent in turn, each time with another ID
	readable chan struct{} // size 1: there may be something to read
	idle     chan struct{} // size 1: all that was to be sent is answered
	closed   chan struct{}

	mu     sync.Mutex // guards the fields below
	ended  bool       // by the client, in one direction or both
	said   []byte     // to be read ahead of messages
	part   []byte     // of a message, what the last Read had no room for
	line   []byte     // of a command that has not come whole
	rdy    int
	window int // messages of the present window that are yet to be sent
	left   int // messages that are yet to be sent
	sent   uint64
	counts bareCounts
}

// bareCounts are what a bareNSQD counts.
type bareCounts struct {
	reads, writes      int // calls of the client's that moved bytes
	rdys, fins, others int // commands; of the others CLS and the handshake are left out
}

func (c bareCounts) since(o bareCounts) bareCounts {
	return bareCounts{c.reads - o.reads, c.writes - o.writes, c.rdys - o.rdys, c.fins - o.fins, c.others - o.others}
}

// newBareNSQD returns one whose messages have bodies of these sizes, in turn. It answers the handshake as nsqd does,
// timeouts included, so that a client does all that it does by default.
func newBareNSQD(sizes ...int) *bareNSQD {
	n := &bareNSQD{
		readable: make(chan struct{}, 1),
		idle:     make(chan struct{}, 1),
		closed:   make(chan struct{}),
	}
	for _, size := range sizes {
		data := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
		data = binary.BigEndian.AppendUint16(data, 1)
		data = append(data, "0f5a1b2c00000000"...)
		n.frames = append(n.frames, fakeFrame(FrameTypeMessage, append(data, make([]byte, size)...)))
	}
	const granted = `{"max_rdy_count":2500,"msg_timeout":60000,"max_msg_timeout":900000}`
	n.said = append(fakeFrame(FrameTypeResponse, []byte(granted)), fakeFrame(FrameTypeResponse, []byte("OK"))...)
	return n
}

// send sends so many messages, and returns when all are answered.
func (n *bareNSQD) send(messages int) {
	n.mu.Lock()
	n.left += messages
	n.mu.Unlock()
	fakeSignal(n.readable)
	<-n.idle
}

func (n *bareNSQD) countsNow() bareCounts {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts
}

func (n *bareNSQD) Read(p []byte) (int, error) {
	for {
		switch read, ended := n.take(p); {
		case read > 0:
			return read, nil
		case ended:
			return 0, io.EOF
		}
		select {
		case <-n.readable:
		case <-n.closed:
			return 0, net.ErrClosed
		}
	}
}

// take fills p with what there is to say.
func (n *bareNSQD) take(p []byte) (read int, ended bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	read = copy(p, n.said)
	n.said = n.said[read:]
	for read < len(p) && len(n.said) == 0 {
		if len(n.part) == 0 {
			if !n.mayDeliverLocked() {
				break
			}
			n.window--
			n.left--
			n.part = n.nextFrameLocked()
		}
		copied := copy(p[read:], n.part)
		n.part = n.part[copied:]
		read += copied
	}
	if read > 0 {
		n.counts.reads++
	}
	return read, n.ended
}

func (n *bareNSQD) mayDeliverLocked() bool {
	switch unanswered := int(n.sent) - n.counts.fins; {
	case !n.windowed:
		n.window = n.rdy - unanswered
	case unanswered == 0:
		n.window = n.rdy
	}
	return n.window > 0 && n.left > 0 && !n.ended
}

// nextFrameLocked returns the next message with an ID of its own: hex digits, of which the last ones count.
func (n *bareNSQD) nextFrameLocked() []byte {
	frame := n.frames[n.sent%uint64(len(n.frames))]
	n.sent++
	const last = frameHeader + messageHeaderSize - 1
	for i, rest := last, n.sent; i > last-8; i, rest = i-1, rest>>4 {
		frame[i] = "0123456789abcdef"[rest&15]
	}
	return frame
}

func (n *bareNSQD) Write(p []byte) (int, error) {
	if n.linkTime > 0 {
		time.Sleep(n.linkTime)
	}
	if isFakeClosed(n.closed) {
		return 0, net.ErrClosed
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts.writes++
	for rest := p; ; {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			n.line = append(n.line, rest...)
			break
		}
		line := rest[:i]
		if len(n.line) > 0 {
			line = append(n.line, line...)
			n.line = nil // that of the handshake is long
		}
		n.commandLocked(line)
		rest = rest[i+1:]
	}
	fakeSignal(n.readable)
	if n.left == 0 && uint64(n.counts.fins) == n.sent && n.sent > 0 {
		fakeSignal(n.idle)
	}
	return len(p), nil
}

// commandLocked carries out a command. The handshake has its answers ready.
func (n *bareNSQD) commandLocked(line []byte) {
	switch {
	case bytes.HasPrefix(line, []byte("FIN ")):
		n.counts.fins++
	case bytes.HasPrefix(line, []byte("RDY ")):
		n.counts.rdys++
		n.rdy = 0
		for _, digit := range line[len("RDY "):] {
			n.rdy = 10*n.rdy + int(digit-'0')
		}
	case bytes.HasPrefix(line, []byte("CLS")):
		n.rdy, n.window = 0, 0
		n.said = append(n.said, fakeFrame(FrameTypeResponse, []byte(closeWait))...)
	case n.rdy > 0:
		n.counts.others++
	}
}

// CloseWrite is the client's goodbye, which nsqd answers by its own.
func (n *bareNSQD) CloseWrite() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ended = true
	fakeSignal(n.readable)
	return nil
}

func (n *bareNSQD) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !isFakeClosed(n.closed) {
		close(n.closed)
	}
	return nil
}

func (n *bareNSQD) LocalAddr() net.Addr              { return fakeAddr("client:50000") }
func (n *bareNSQD) RemoteAddr() net.Addr             { return fakeAddr("nsqd-1:4150") }
func (n *bareNSQD) SetDeadline(time.Time) error      { return nil }
func (n *bareNSQD) SetReadDeadline(time.Time) error  { return nil }
func (n *bareNSQD) SetWriteDeadline(time.Time) error { return nil }

// newBareConsumer returns a silent consumer whose connections are made by dial. It is stopped at the test's end.
func newBareConsumer(tb testing.TB, maxInFlight int, dial func() net.Conn, h Handler, concurrency int) *Consumer {
	tb.Helper()
	cfg := NewConfig()
	cfg.MaxInFlight = maxInFlight
	cfg.Dial = func(context.Context, string, string) (net.Conn, error) { return dial(), nil }
	r, err := NewConsumer("t", "c", cfg)
	require.NoError(tb, err)
	r.SetLogger(nil, LogLevelError)
	r.AddConcurrentHandlers(h, concurrency)
	tb.Cleanup(func() {
		r.Stop()
		<-r.StopChan
	})
	return r
}

// connectBare has a consumer read from one nsqd over conn, which is the nsqd itself or leads to it.
func connectBare(tb testing.TB, conn net.Conn, maxInFlight int, h Handler, concurrency int) {
	tb.Helper()
	r := newBareConsumer(tb, maxInFlight, func() net.Conn { return conn }, h, concurrency)
	require.NoError(tb, r.ConnectToNSQD("nsqd-1:4150"))
}

// bareAddr is the address of the i-th of many nsqds.
func bareAddr(i int) string { return fmt.Sprintf("nsqd-%d:4150", i+1) }
