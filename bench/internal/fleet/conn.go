package fleet

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	frameResponse = 0
	frameError    = 1
	frameMessage  = 2

	idLength    = 16
	bodySize    = 100
	messageSize = 8 + 8 + 2 + idLength + bodySize // header of the frame, timestamp, attempts, ID, body

	// readBuffer is small because there are many connections, and large enough for IDENTIFY and for some FINs.
	readBuffer = 1 << 10

	// writeTimeout is when a consumer that doesn't read is given up.
	writeTimeout = 10 * time.Second

	maxIdentify = 64 << 10
)

// identified is what an nsqd says about itself: nothing to negotiate.
var identified = []byte(`{"max_rdy_count":` + strconv.Itoa(MaxRDY) + `,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,` +
	`"tls_v1":false,"deflate":false,"snappy":false,"auth_required":false}`)

// conn is a consumer's connection. Its goroutine reads commands and sends messages as RDY and FIN make room; a timer sends
// heartbeats.
type conn struct {
	nsqd *nsqd
	nc   net.Conn
	r    *bufio.Reader

	subscribed bool // owned by serve
	closing    bool // same: CLS came

	mu        sync.Mutex // guards the fields below and is held for writing, so that frames stay whole
	rdy       int64
	unended   map[uint64]bool // messages without FIN or REQ
	sent      uint64          // messages so far; the next one's ID
	heartbeat *time.Timer     // nil before IDENTIFY
	beat      time.Duration
	ended     bool
}

func newConn(q *nsqd, nc net.Conn) *conn {
	return &conn{nsqd: q, nc: nc, unended: make(map[uint64]bool)}
}

// close makes serve return.
func (c *conn) close() error {
	err := c.nc.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// end forgets a connection whose serve has returned.
func (c *conn) end() {
	c.mu.Lock()
	c.ended = true
	if c.heartbeat != nil {
		c.heartbeat.Stop()
	}
	rdy := c.rdy
	c.mu.Unlock()
	_ = c.close() // the consumer may have closed it already
	c.nsqd.gone(c, rdy)
}

// serve reads commands until the connection ends. The error is what the consumer did wrong.
func (c *conn) serve() error {
	c.r = bufio.NewReaderSize(&countedReader{c.nc, c.nsqd.fleet}, readBuffer)
	magic := make([]byte, 4)
	if _, err := io.ReadFull(c.r, magic); err != nil {
		return nil // it connected and went away
	}
	if string(magic) != "  V2" {
		return fmt.Errorf("magic %q", magic)
	}
	for {
		line, err := c.r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("a line of more than %d bytes: %.40q", readBuffer, line)
		}
		if err != nil {
			return nil // closing is the consumer's right at any time
		}
		if err := c.command(bytes.TrimSuffix(line, []byte("\n"))); err != nil {
			return err
		}
		if c.r.Buffered() > 0 {
			continue // more FINs make room for more messages in one write
		}
		c.send()
	}
}

// command carries out one command. The error is for the consumer's breach of the protocol; that a connection is gone shows
// at the next read.
func (c *conn) command(line []byte) error {
	name, params, _ := strings.Cut(string(line), " ")
	f := c.nsqd.fleet
	switch name {
	case "IDENTIFY":
		f.count(func(n *Counts) { n.Identifies++ })
		return c.identify()
	case "SUB":
		if c.subscribed {
			return errors.New("a second SUB")
		}
		c.respond("OK")
		c.subscribed = true
		f.count(func(n *Counts) { n.Subscribed++ })
		return nil
	case "NOP":
		f.count(func(n *Counts) { n.NOPs++ })
		return nil
	}
	if !c.subscribed {
		return fmt.Errorf("%s before SUB", name)
	}
	switch name {
	case "RDY":
		return c.setRDY(params)
	case "FIN":
		f.count(func(n *Counts) { n.FINs++ })
		return c.answered(params, true)
	case "REQ":
		id, _, _ := strings.Cut(params, " ")
		f.count(func(n *Counts) { n.REQs++ })
		return c.answered(id, true)
	case "TOUCH":
		f.count(func(n *Counts) { n.TOUCHes++ })
		return c.answered(params, false)
	case "CLS":
		if c.closing {
			return errors.New("a second CLS")
		}
		c.closing = true
		c.respond("CLOSE_WAIT")
		return nil
	}
	return fmt.Errorf("command %.40q", line)
}

// identify reads the body of IDENTIFY and answers it.
func (c *conn) identify() error {
	var size uint32
	if err := binary.Read(c.r, binary.BigEndian, &size); err != nil {
		return fmt.Errorf("IDENTIFY: %w", err)
	}
	if size > maxIdentify {
		return fmt.Errorf("IDENTIFY of %d bytes", size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return fmt.Errorf("IDENTIFY: %w", err)
	}
	var asked struct {
		HeartbeatInterval int64 `json:"heartbeat_interval"` // milliseconds
	}
	if err := json.Unmarshal(body, &asked); err != nil {
		return fmt.Errorf("IDENTIFY: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if asked.HeartbeatInterval > 0 {
		c.beat = time.Duration(asked.HeartbeatInterval) * time.Millisecond
		c.heartbeat = time.AfterFunc(c.beat, c.sendHeartbeat)
	}
	c.writeLocked(appendFrame(nil, frameResponse, identified))
	return nil
}

func (c *conn) setRDY(params string) error {
	rdy, err := strconv.ParseInt(params, 10, 64)
	if err != nil || rdy < 0 || rdy > MaxRDY {
		return fmt.Errorf("RDY %.40q", params)
	}
	if c.closing {
		rdy = 0 // nsqd ignores it from CLS on
	}
	c.mu.Lock()
	change := rdy - c.rdy
	c.rdy = rdy
	c.mu.Unlock()
	c.nsqd.rdyChanged(change)
	return nil
}

// answered checks that a message is in flight, and ends that for FIN and REQ.
func (c *conn) answered(id string, ends bool) error {
	n, err := strconv.ParseUint(id, 16, 64)
	if err != nil || len(id) != idLength {
		return fmt.Errorf("an answer to message %.40q", id)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.unended[n] {
		return fmt.Errorf("an answer to message %s, which is not in flight", id)
	}
	if ends {
		delete(c.unended, n)
	}
	return nil
}

// send sends as many messages as RDY has room for, if the nsqd has any. They go out in one write.
func (c *conn) send() {
	f := c.nsqd.fleet
	f.mu.Lock()
	flowing := c.nsqd.flowing
	f.mu.Unlock()
	if !flowing {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	room := int(c.rdy) - len(c.unended)
	if room <= 0 {
		return
	}
	frames := make([]byte, 0, room*messageSize)
	for range room {
		c.sent++
		c.unended[c.sent] = true
		frames = appendMessage(frames, c.sent)
	}
	f.count(func(n *Counts) { n.Messages += room })
	c.writeLocked(frames)
}

func (c *conn) sendHeartbeat() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.nsqd.fleet.count(func(n *Counts) { n.Heartbeats++ })
	c.writeLocked(appendFrame(nil, frameResponse, []byte("_heartbeat_")))
	c.heartbeat.Reset(c.beat)
}

func (c *conn) respond(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeLocked(appendFrame(nil, frameResponse, []byte(text)))
}

// writeLocked writes whole frames. An error ends the connection, which serve then sees.
func (c *conn) writeLocked(frames []byte) {
	err := c.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if err == nil {
		_, err = c.nc.Write(frames)
	}
	if err != nil {
		_ = c.close()
	}
	c.nsqd.fleet.count(func(n *Counts) { n.BytesOut += int64(len(frames)) })
}

func appendFrame(b []byte, frameType uint32, data []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(4+len(data)))
	b = binary.BigEndian.AppendUint32(b, frameType)
	return append(b, data...)
}

func appendMessage(b []byte, id uint64) []byte {
	b = binary.BigEndian.AppendUint32(b, messageSize-4)
	b = binary.BigEndian.AppendUint32(b, frameMessage)
	b = binary.BigEndian.AppendUint64(b, uint64(time.Now().UnixNano()))
	b = binary.BigEndian.AppendUint16(b, 1)
	b = fmt.Appendf(b, "%016x", id)
	return append(b, make([]byte, bodySize)...)
}

// countedReader counts the bytes that come from consumers.
type countedReader struct {
	nc    net.Conn
	fleet *Fleet
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.nc.Read(p)
	r.fleet.count(func(c *Counts) { c.BytesIn += int64(n) })
	return n, err
}
