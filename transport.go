package nsq

import (
	"compress/flate"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/golang/snappy"
)

// transport is a connection's byte stream in its layers: the socket, TLS on it if negotiated, compression on top.
type transport struct {
	socket *socket
	conn   net.Conn  // the socket or TLS
	r      io.Reader // the topmost layer
	w      io.Writer
	flush  func() error // sends what compression holds back; nil without compression
}

func newTransport(nc net.Conn, writeTimeout time.Duration) *transport {
	s := &socket{Conn: nc, writeTimeout: writeTimeout}
	return &transport{socket: s, conn: s, r: s, w: s}
}

// write sends p through all layers.
func (t *transport) write(p []byte) error {
	if _, err := t.w.Write(p); err != nil {
		return err
	}
	if t.flush == nil {
		return nil
	}
	return t.flush()
}

func (t *transport) addTLS(conn *tls.Conn) {
	t.conn, t.r, t.w = conn, conn, conn
}

func (t *transport) addSnappy() {
	w := snappy.NewBufferedWriter(t.conn)
	t.r, t.w, t.flush = snappy.NewReader(t.conn), w, w.Flush
}

func (t *transport) addDeflate(level int) error {
	w, err := flate.NewWriter(t.conn, level)
	if err != nil {
		return err
	}
	// Flush ends in a sync marker, with which nsqd can decode all that it has.
	t.r, t.w, t.flush = flate.NewReader(t.conn), w, w.Flush
	return nil
}

// closeWrite ends the writing side. It reports whether the connection can do that.
func (t *transport) closeWrite() bool {
	if c, ok := t.conn.(*tls.Conn); ok {
		_ = c.CloseWrite() // the goodbye of TLS; what counts is the FIN below
	}
	c, ok := t.socket.Conn.(interface{ CloseWrite() error })
	return ok && c.CloseWrite() == nil
}

// close closes the socket itself. The goodbye of TLS could block on a peer that doesn't read.
func (t *transport) close() {
	var err error
	defer contain(&err, "Close of the connection")
	_ = t.socket.Conn.Close()
}

// contain makes an error of a panic in a user's code, which Config.Dial and Config.TlsConfig bring in. It is to be deferred.
func contain(err *error, what string) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("nsq: %s panicked: %v\n%s", what, p, debug.Stack())
	}
}

// socket is the lowest layer. It sets the deadlines: below TLS and compression each byte counts as a sign of life,
// and a deadline that passes there for good may leave those layers unusable.
type socket struct {
	net.Conn
	writeTimeout time.Duration // 0: none

	silence time.Duration // the longest one accepted; 0: any. Set before the loops begin
	last    atomic.Int64  // when bytes came last
	armed   atomic.Int64  // when the deadline was set last
}

// watchSilence makes Read fail with ErrHeartbeatTimeout when nothing comes for so long (0: never).
func (s *socket) watchSilence(d time.Duration) error {
	s.silence = d
	now := monotonic()
	s.last.Store(now)
	return s.arm(now, d)
}

func (s *socket) arm(now int64, d time.Duration) error {
	s.armed.Store(now)
	if d == 0 {
		return s.SetReadDeadline(time.Time{})
	}
	return s.SetReadDeadline(instant(now).Add(d))
}

// Read sets the deadline anew only when a quarter of it is used up, since that costs as much as reading
// (BenchmarkConsume). So it may pass too early; then it is set for the rest.
func (s *socket) Read(p []byte) (n int, err error) {
	defer contain(&err, "Read of the connection")
	for {
		n, err := s.Conn.Read(p)
		if s.silence == 0 {
			return n, err
		}
		now := monotonic()
		if n > 0 {
			s.last.Store(now)
			if time.Duration(now-s.armed.Load()) > s.silence/4 {
				if err := s.arm(now, s.silence); err != nil {
					return n, err
				}
			}
			return n, err
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		left := s.silence - time.Duration(now-s.last.Load())
		if left <= 0 {
			return 0, ErrHeartbeatTimeout
		}
		if err := s.arm(now, left); err != nil {
			return 0, err
		}
	}
}

// maxWrite is how much is written under one deadline, so that a slow link has the time for each of its pieces.
const maxWrite = 64 << 10

func (s *socket) Write(p []byte) (written int, err error) {
	defer contain(&err, "Write of the connection")
	for {
		piece := p[:min(len(p), maxWrite)]
		if s.writeTimeout > 0 {
			if err := s.SetWriteDeadline(time.Now().Add(s.writeTimeout)); err != nil {
				return written, err
			}
		}
		n, err := s.Conn.Write(piece)
		written += n
		if p = p[n:]; err != nil || len(p) == 0 {
			return written, err
		}
	}
}
