package nsq

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// fakeAddr is the address of an end of a fake pipe.
type fakeAddr string

func (a fakeAddr) Network() string { return "tcp" }
func (a fakeAddr) String() string  { return string(a) }

// fakeStream is one end of an in-memory TCP connection. Unlike net.Pipe it has socket buffers of a chosen size, can be
// half-closed and can be reset. Everything it waits for is a channel, so it is durably blocking in a synctest bubble.
//
// It is harsher than a network in one way: a Read never returns bytes of two writes, so that the far end decides about
// segments.
type fakeStream struct {
	in, out       *fakeHalf
	local, remote fakeAddr
	readDeadline  fakeDeadline
	writeDeadline fakeDeadline
	writeTurn     chan struct{} // size 1; holds a token while a Write is running, to keep writes whole
	closeOnce     sync.Once
	closed        chan struct{}

	// lossyClose makes a Close with unread input what it is in TCP: a reset, which takes what the peer has not read yet
	// with it. It is set on the client's end alone: what a fake nsqd says before it hangs up should arrive.
	lossyClose bool
}

// newFakePipe returns the two ends of a connection that holds size bytes in each direction. With size 0 a Write lasts
// until the other side has read all of it, as with net.Pipe.
func newFakePipe(size int, clientAddr, serverAddr fakeAddr) (client, server *fakeStream) {
	up, down := newFakeHalf(size), newFakeHalf(size)
	client = newFakeStream(down, up, clientAddr, serverAddr)
	client.lossyClose = true
	return client, newFakeStream(up, down, serverAddr, clientAddr)
}

func newFakeStream(in, out *fakeHalf, local, remote fakeAddr) *fakeStream {
	return &fakeStream{
		in: in, out: out, local: local, remote: remote,
		readDeadline:  fakeDeadline{passed: make(chan struct{})},
		writeDeadline: fakeDeadline{passed: make(chan struct{})},
		writeTurn:     make(chan struct{}, 1),
		closed:        make(chan struct{}),
	}
}

func (s *fakeStream) LocalAddr() net.Addr  { return s.local }
func (s *fakeStream) RemoteAddr() net.Addr { return s.remote }

func (s *fakeStream) SetDeadline(t time.Time) error {
	s.readDeadline.set(t)
	s.writeDeadline.set(t)
	return nil
}

func (s *fakeStream) SetReadDeadline(t time.Time) error {
	s.readDeadline.set(t)
	return nil
}

func (s *fakeStream) SetWriteDeadline(t time.Time) error {
	s.writeDeadline.set(t)
	return nil
}

func (s *fakeStream) Read(p []byte) (int, error) {
	for {
		if err := s.stopped(&s.readDeadline); err != nil {
			return 0, s.opError("read", err)
		}
		n, changed, err := s.in.take(p)
		if err == io.EOF {
			return 0, err
		}
		if err != nil {
			return 0, s.opError("read", err)
		}
		if n > 0 || len(p) == 0 {
			return n, nil
		}
		s.wait(changed, &s.readDeadline)
	}
}

func (s *fakeStream) Write(p []byte) (int, error) {
	if !s.takeWriteTurn() {
		return 0, s.opError("write", s.stopped(&s.writeDeadline))
	}
	defer func() { <-s.writeTurn }()

	written := 0
	for {
		if err := s.stopped(&s.writeDeadline); err != nil {
			return written - s.out.takeBack(), s.opError("write", err)
		}
		n, done, changed, err := s.out.put(p[written:])
		written += n
		if err != nil {
			return written, s.opError("write", err)
		}
		if done {
			return written, nil
		}
		if n == 0 {
			s.wait(changed, &s.writeDeadline)
		}
	}
}

// takeWriteTurn waits until no other Write is running. It reports false if the stream was closed or the deadline passed.
func (s *fakeStream) takeWriteTurn() bool {
	select {
	case s.writeTurn <- struct{}{}:
		return true
	case <-s.closed:
	case <-s.writeDeadline.wait():
	}
	return false
}

// stopped returns why an operation can't go on at this end, if so.
func (s *fakeStream) stopped(d *fakeDeadline) error {
	select {
	case <-s.closed:
		return net.ErrClosed
	default:
	}
	select {
	case <-d.wait():
		return os.ErrDeadlineExceeded
	default:
		return nil
	}
}

func (s *fakeStream) wait(changed <-chan struct{}, d *fakeDeadline) {
	select {
	case <-changed:
	case <-s.closed:
	case <-d.wait():
	}
}

// CloseWrite ends the outgoing direction: the peer reads to the end and then meets io.EOF.
func (s *fakeStream) CloseWrite() error {
	s.out.finish()
	return nil
}

// Close ends both directions. See lossyClose for unread input.
func (s *fakeStream) Close() error {
	s.closeOnce.Do(func() {
		if s.in.refuse() > 0 && s.lossyClose {
			s.out.fail(syscall.ECONNRESET)
		}
		s.out.finish()
		close(s.closed)
	})
	return nil
}

// reset breaks the connection in both directions at once. Bytes on their way are lost.
func (s *fakeStream) reset() {
	s.in.fail(syscall.ECONNRESET)
	s.out.fail(syscall.ECONNRESET)
}

func (s *fakeStream) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: s.local, Addr: s.remote, Err: err}
}

// fakeHalf is one direction of a fake pipe.
type fakeHalf struct {
	size int // 0: a write lasts until all of it was read

	mu       sync.Mutex    // guards the fields below
	segments [][]byte      // written and not read yet
	held     int           // bytes in segments
	writes   int           // segments ever written
	ended    bool          // by the writer
	refused  bool          // the reader has gone
	err      error         // reset
	changed  chan struct{} // closed and replaced at each change
}

func newFakeHalf(size int) *fakeHalf {
	return &fakeHalf{size: size, changed: make(chan struct{})}
}

// notify wakes all who wait for a change. mu is held.
func (h *fakeHalf) notify() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// take reads from the first segment. Without bytes or an error the caller is to wait for changed.
func (h *fakeHalf) take(p []byte) (n int, changed <-chan struct{}, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.err != nil:
		return 0, nil, h.err
	case len(h.segments) == 0 && h.ended:
		return 0, nil, io.EOF
	case len(h.segments) == 0:
		return 0, h.changed, nil
	}
	n = copy(p, h.segments[0])
	h.held -= n
	if h.segments[0] = h.segments[0][n:]; len(h.segments[0]) == 0 {
		h.segments = h.segments[1:]
	}
	if n > 0 {
		h.notify()
	}
	return n, nil, nil
}

// put writes as much of p as there is room for. Called again with what is left, until done.
func (h *fakeHalf) put(p []byte) (n int, done bool, changed <-chan struct{}, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.err != nil:
		return 0, false, nil, h.err
	case len(p) == 0 && (h.size > 0 || h.held == 0): // all is written, and read if it has to be
		return 0, true, nil, nil
	case h.ended, h.refused:
		return 0, false, nil, syscall.EPIPE
	case len(p) == 0:
		return 0, false, h.changed, nil
	}
	n = min(len(p), h.size-h.held)
	if h.size == 0 && h.held == 0 {
		n = len(p)
	}
	if n <= 0 {
		return 0, false, h.changed, nil
	}
	h.segments = append(h.segments, append([]byte(nil), p[:n]...))
	h.held += n
	h.writes++
	h.notify()
	return n, n == len(p) && h.size > 0, h.changed, nil
}

// writesSoFar tells how many writes have brought bytes to the buffer.
func (h *fakeHalf) writesSoFar() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.writes
}

// takeBack removes what an unbuffered write has left unread, since such a write reports only what was read.
func (h *fakeHalf) takeBack() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.size > 0 {
		return 0
	}
	return h.discard()
}

// finish is the writer's end of the direction.
func (h *fakeHalf) finish() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended = true
	h.notify()
}

// refuse is the reader's end of the direction: further writes fail. It returns how many bytes nobody will read.
func (h *fakeHalf) refuse() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = true
	h.notify()
	return h.discard()
}

// fail makes all further reads and writes return err.
func (h *fakeHalf) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
	h.discard()
	h.notify()
}

// discard forgets the unread bytes. mu is held.
func (h *fakeHalf) discard() int {
	n := h.held
	h.segments, h.held = nil, 0
	return n
}

// fakeDeadline is a deadline as a channel.
type fakeDeadline struct {
	mu         sync.Mutex // guards the fields below
	timer      *time.Timer
	generation int           // tells the timer's callback whether it is still wanted
	passed     chan struct{} // closed once the deadline has passed
}

func (d *fakeDeadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.passed
}

func (d *fakeDeadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
	d.generation++
	select {
	case <-d.passed:
		d.passed = make(chan struct{})
	default:
	}
	if t.IsZero() {
		return
	}
	generation := d.generation
	if left := time.Until(t); left > 0 {
		d.timer = time.AfterFunc(left, func() { d.expire(generation) })
		return
	}
	close(d.passed)
}

func (d *fakeDeadline) expire(generation int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.generation == generation {
		close(d.passed)
	}
}
