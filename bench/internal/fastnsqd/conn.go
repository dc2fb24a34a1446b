package fastnsqd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	maxRDY            = 2500
	heartbeatInterval = 30 * time.Second

	finLength = len("FIN 0123456789abcdef\n")
)

// conn is the connection to the consumer. Two goroutines serve it once it has subscribed: receive reads commands, send is the only one that
// writes. Neither waits for the other to get through, or a consumer that writes before it reads would stand still.
type conn struct {
	server *Server
	link   link

	rdy      atomic.Int64  // written by receive
	sent     atomic.Int64  // written by send, before the messages go out; their numbers are 0 to sent-1
	finished atomic.Int64  // written by receive
	closing  atomic.Bool   // CLS came; written by receive
	kick     chan struct{} // size 1: one of them has changed
	gone     chan struct{} // closed when receive has ended

	seen []uint64 // a bit for each message that was finished; owned by receive
}

func newConn(nc net.Conn, s *Server) *conn {
	return &conn{
		server: s,
		link:   newLink(nc),
		kick:   make(chan struct{}, 1),
		gone:   make(chan struct{}),
		seen:   make([]uint64, s.messages/64+1),
	}
}

// serve serves the connection until the consumer closes it.
func (c *conn) serve() (finished int, err error) {
	if err := c.handshake(); err != nil {
		return 0, fmt.Errorf("fastnsqd: %w", err)
	}
	sendErr := make(chan error, 1)
	go func() {
		err := c.send()
		if err != nil {
			_ = c.link.nc.Close() // so that receive ends
		}
		sendErr <- err
	}()
	err = c.receive()
	close(c.gone)
	_ = c.link.nc.Close() // so that send ends
	sent, done := c.sent.Load(), c.finished.Load()
	switch writeErr := <-sendErr; {
	case err != nil && writeErr != nil && errors.Is(err, net.ErrClosed):
		err = writeErr
	case err == nil && (sent < int64(c.server.messages) || done < sent):
		err = fmt.Errorf("the consumer has gone: %d of %d messages sent, %d finished", sent, c.server.messages, done)
	}
	if err != nil {
		return int(done), fmt.Errorf("fastnsqd: %w", err)
	}
	return int(done), nil
}

// ---- connecting

// identify is what matters here of a consumer's IDENTIFY.
type identify struct {
	FeatureNegotiation bool `json:"feature_negotiation"`
	TLS                bool `json:"tls_v1"`
	Snappy             bool `json:"snappy"`
	Deflate            bool `json:"deflate"`
}

// handshake goes through IDENTIFY with what it grants, and SUB.
func (c *conn) handshake() error {
	var magic [4]byte
	if _, err := io.ReadFull(c.link.r, magic[:]); err != nil {
		return err
	}
	if string(magic[:]) != "  V2" {
		return fmt.Errorf("magic is %q", magic)
	}
	for {
		line, err := c.link.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		words := bytes.Fields(line)
		if len(words) == 0 {
			return errors.New("an empty line")
		}
		switch string(words[0]) {
		case "IDENTIFY":
			if err := c.identify(); err != nil {
				return err
			}
		case "SUB":
			return c.link.respond("OK")
		case "NOP":
		default:
			return fmt.Errorf("%q before SUB", line)
		}
	}
}

func (c *conn) identify() error {
	data, err := c.link.readBody()
	if err != nil {
		return err
	}
	var asked identify
	if err := json.Unmarshal(data, &asked); err != nil {
		return fmt.Errorf("IDENTIFY: %w", err)
	}
	if !asked.FeatureNegotiation {
		return c.link.respond("OK")
	}
	if asked.Snappy && asked.Deflate {
		return errors.New("IDENTIFY: both compressions")
	}
	answer, err := json.Marshal(map[string]any{
		"max_rdy_count":         maxRDY,
		"version":               "1.3.0",
		"msg_timeout":           time.Minute.Milliseconds(),
		"max_msg_timeout":       (15 * time.Minute).Milliseconds(),
		"tls_v1":                asked.TLS,
		"snappy":                asked.Snappy,
		"deflate":               asked.Deflate,
		"deflate_level":         deflateLevel,
		"max_deflate_level":     deflateLevel,
		"sample_rate":           0,
		"auth_required":         false,
		"output_buffer_size":    16 << 10,
		"output_buffer_timeout": 250,
	})
	if err != nil {
		return err
	}
	if err := c.link.respond(string(answer)); err != nil {
		return err
	}
	if asked.TLS {
		if err := c.link.startTLS(c.server.tls); err != nil {
			return err
		}
	}
	if asked.Snappy {
		if err := c.link.startSnappy(); err != nil {
			return err
		}
	}
	if asked.Deflate {
		return c.link.startDeflate()
	}
	return nil
}

// ---- commands

// receive reads commands until the consumer closes the connection, which is no error.
func (c *conn) receive() error {
	buf := make([]byte, 0, 256<<10)
	for {
		n, err := c.link.r.Read(buf[len(buf):cap(buf)])
		rest, cmdErr := c.commands(buf[:len(buf)+n])
		if cmdErr != nil {
			return cmdErr
		}
		buf = buf[:copy(buf[:cap(buf)], rest)]
		c.tell()
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && c.closing.Load(): // the end of a compressed stream
			if len(buf) > 0 {
				return fmt.Errorf("the consumer has gone in %q", buf)
			}
			return nil
		default:
			return err
		}
	}
}

// commands carries out the commands in b and returns what is left: part of one.
func (c *conn) commands(b []byte) (rest []byte, err error) {
	finished := int64(0)
	defer func() { c.finished.Add(finished) }()
	for {
		// Nearly all there is: a line of this length that begins so. The number decides whether it is right.
		for len(b) >= finLength && b[0] == 'F' {
			if err := c.finish(b[:finLength]); err != nil {
				return nil, err
			}
			finished++
			b = b[finLength:]
		}
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			if len(b) > 1<<10 {
				return nil, fmt.Errorf("a line without end: %q", b[:64])
			}
			return b, nil
		}
		if err := c.command(b[:i+1]); err != nil {
			return nil, err
		}
		b = b[i+1:]
	}
}

// finish notes a FIN. It must name a message that is in flight: sent, and not finished before.
func (c *conn) finish(line []byte) error {
	n, ok := messageNumber(line[len("FIN ") : finLength-1])
	if !ok || string(line[:4]) != "FIN " || line[finLength-1] != '\n' {
		return fmt.Errorf("%q names no message", line)
	}
	if n >= c.sent.Load() {
		return fmt.Errorf("%q: it was not sent yet", line)
	}
	word, bit := &c.seen[n/64], uint64(1)<<(n%64)
	if *word&bit != 0 {
		return fmt.Errorf("%q: it is finished already", line)
	}
	*word |= bit
	return nil
}

// command carries out what is not a FIN.
func (c *conn) command(line []byte) error {
	words := bytes.Fields(line)
	switch {
	case len(words) == 2 && string(words[0]) == "RDY":
		n, err := strconv.ParseUint(string(words[1]), 10, 63)
		if err != nil || n > maxRDY {
			return fmt.Errorf("%q is out of range", line)
		}
		c.rdy.Store(int64(n))
		return nil
	case len(words) == 1 && string(words[0]) == "CLS":
		c.closing.Store(true)
		return nil
	case len(words) == 1 && string(words[0]) == "NOP":
		return nil
	}
	return fmt.Errorf("%q has no place in this workload", line)
}

// tell lets send have another look.
func (c *conn) tell() {
	select {
	case c.kick <- struct{}{}:
	default: // it will find this too
	}
}

// ---- messages

// send sends messages and whatever else is due, until all is said or the consumer has gone. An error is one of writing.
func (c *conn) send() error {
	heartbeats := time.NewTicker(heartbeatInterval)
	defer heartbeats.Stop()
	frames := newFrames(c.server.body)
	for {
		if n := min(c.room(), int64(frames.most())); n > 0 {
			first := c.sent.Load()
			data := frames.from(first, int(n))
			c.sent.Store(first + n) // first, as FINs come before the write returns
			if err := c.link.write(data); err != nil {
				return err
			}
			continue
		}
		if c.closing.Load() {
			return c.link.respond("CLOSE_WAIT")
		}
		select {
		case <-c.kick:
		case <-heartbeats.C:
			if err := c.link.respond("_heartbeat_"); err != nil {
				return err
			}
		case <-c.gone:
			return nil
		}
	}
}

// room is how many messages may be sent now.
func (c *conn) room() int64 {
	if c.closing.Load() {
		return 0
	}
	// finished before sent would be just as good: only this goroutine changes sent, and finished only grows.
	sent := c.sent.Load()
	return min(c.rdy.Load()-(sent-c.finished.Load()), int64(c.server.messages)-sent)
}
