package nsqtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Direction names one or both ways through a [Proxy].
type Direction int

const (
	ToServer Direction = 1 << iota // what the client sends
	ToClient                       // what the server sends
	Both     = ToServer | ToClient
)

// A lane is one way through the proxy, as an index.
const (
	laneToServer = iota
	laneToClient
	lanes
)

// lanes lists the lanes of a direction.
func (d Direction) lanes() []int {
	var list []int
	if d&ToServer != 0 {
		list = append(list, laneToServer)
	}
	if d&ToClient != 0 {
		list = append(list, laneToClient)
	}
	return list
}

// faults is what is wrong with one lane. The zero value is a healthy one.
type faults struct {
	latency      time.Duration
	blackHole    bool
	stall        bool
	trickleBytes int // 0 is off
	tricklePause time.Duration
	cutAfter     int64  // bytes left until a connection is reset; 0 is off
	holdAt       string // empty is off
}

// Proxy forwards TCP connections to a target, and breaks them on demand. Faults can be switched at any time, work on open and on new
// connections, add up, and last until [Proxy.Heal]. While there are none, bytes, the end of either direction and resets pass
// through as they come. All methods may be called from several goroutines, and none waits for a peer.
type Proxy struct {
	addr     string
	wg       sync.WaitGroup // all goroutines
	bytes    [lanes]atomic.Int64
	accepted atomic.Int64

	mu       sync.Mutex // guards the fields below
	target   string
	listener net.Listener // nil while connections are refused
	links    map[*link]struct{}
	faults   [lanes]faults
	silent   bool
	changed  chan struct{} // closed, and replaced, when faults or silent change
	closed   bool
}

// StartProxy starts a proxy that is closed when the test ends; a failure ends the test.
func StartProxy(tb TB, target string) *Proxy {
	tb.Helper()
	p, err := NewProxy(target)
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	closeAfter(tb, "proxy", p.Close)
	return p
}

// NewProxy starts a proxy on a free port of 127.0.0.1, which runs until Close. The target, a "host:port", need not be there yet: it is
// connected to for each connection. If that fails, the client's connection is reset.
func NewProxy(target string) (*Proxy, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	return newProxy(addr, target)
}

func newProxy(addr, target string) (*Proxy, error) {
	p := &Proxy{addr: addr, target: target, links: make(map[*link]struct{}), changed: make(chan struct{})}
	if err := p.listen(); err != nil {
		return nil, err
	}
	return p, nil
}

// listen accepts connections from now on.
func (p *Proxy) listen() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	if p.listener != nil {
		return nil
	}
	// Listening and closing under the lock, as neither waits for anybody: Refuse and Heal can't overtake each other.
	listener, err := net.Listen("tcp", p.addr)
	if err != nil {
		return fmt.Errorf("nsqtest: proxy: %w", err)
	}
	p.listener = listener
	p.wg.Go(func() { p.acceptLoop(listener) })
	return nil
}

// refuse stops accepting. It needs p.mu.
func (p *Proxy) refuse() error {
	if p.listener == nil {
		return nil
	}
	err := p.listener.Close()
	p.listener = nil
	return err
}

func (p *Proxy) acceptLoop(listener net.Listener) {
	for {
		nc, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(startPause) // out of file descriptors, most likely
			continue
		}
		p.accepted.Add(1)
		p.wg.Go(func() { p.serve(nc.(*net.TCPConn)) })
	}
}

// Addr returns the "host:port" to connect to. It never changes.
func (p *Proxy) Addr() string { return p.addr }

// SetTarget names the "host:port" that new connections go to. Open ones stay where they are.
func (p *Proxy) SetTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Conns returns how many connections are open.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Accepted returns how many connections there have been.
func (p *Proxy) Accepted() int64 { return p.accepted.Load() }

// Bytes returns how many bytes have been passed on, in all connections so far. Both is the sum.
func (p *Proxy) Bytes(d Direction) int64 {
	var n int64
	for _, lane := range d.lanes() {
		n += p.bytes[lane].Load()
	}
	return n
}

// Latency delivers all bytes, and the end of the stream, d later than they come. It doesn't slow a stream down: much may be on its
// way at once. Zero turns it off.
func (p *Proxy) Latency(dir Direction, d time.Duration) {
	p.change(dir, func(f *faults) { f.latency = d })
}

// BlackHole swallows bytes and the end of the stream. The connection stays open, and the sender can't tell. What has been swallowed is
// gone: after Heal the stream has a gap, which both ends take for garbage, so Cut before it. Use Stall for a link that only pauses.
func (p *Proxy) BlackHole(dir Direction) {
	p.change(dir, func(f *faults) { f.blackHole = true })
}

// Stall stops reading from the sender, whose buffers then fill up. Nothing is lost: all goes on with Heal. What has been read
// already is held back.
func (p *Proxy) Stall(dir Direction) {
	p.change(dir, func(f *faults) { f.stall = true })
}

// Trickle passes at most n bytes at a time, and pauses after each. With n of 1 every byte is a packet of its own. Zero turns it off.
func (p *Proxy) Trickle(dir Direction, n int, pause time.Duration) {
	p.change(dir, func(f *faults) { f.trickleBytes, f.tricklePause = n, pause })
}

// CutAfter resets a connection once: that which carries the n-th byte from now on, right after that byte. It counts the bytes of
// all connections, and each direction for itself. Zero turns it off.
func (p *Proxy) CutAfter(dir Direction, n int64) {
	p.change(dir, func(f *faults) { f.cutAfter = n })
}

// HoldAt holds each connection back at the next occurrence of text, which doesn't pass, nor does anything after it. If text comes in
// pieces, its beginning may have passed. Nothing is lost: all goes on with Heal. So a peer is made that never sees, or never
// gives, one step of a handshake, while the other direction goes on: hold ToServer at "SUB ", or ToClient at "CLOSE_WAIT". In a
// stream with TLS or compression the text is that of the encoded bytes. An empty text turns it off.
func (p *Proxy) HoldAt(dir Direction, text string) {
	p.change(dir, func(f *faults) { f.holdAt = text })
}

// change changes the faults of a direction and tells those who wait for that.
func (p *Proxy) change(dir Direction, edit func(*faults)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, lane := range dir.lanes() {
		edit(&p.faults[lane])
	}
	p.tell()
}

// tell wakes those who wait in await. It needs p.mu.
func (p *Proxy) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Silent accepts new connections without connecting them to the target: nothing is read, and nothing answers. With Heal they
// are connected as if nothing had been.
func (p *Proxy) Silent() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = true
	p.tell()
}

// Refuse stops listening, so that new connections are refused by the system. Open ones go on.
func (p *Proxy) Refuse() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refuse()
}

// Heal ends all faults. The error is that of listening again after Refuse.
func (p *Proxy) Heal() error {
	p.mu.Lock()
	p.faults = [lanes]faults{}
	p.silent = false
	p.tell()
	p.mu.Unlock()
	return p.listen()
}

// Cut closes all open connections at both ends, and returns how many there were. Bytes on their way are lost.
func (p *Proxy) Cut() int { return p.closeLinks(false) }

// Reset is Cut with a TCP reset instead of an orderly end.
func (p *Proxy) Reset() int { return p.closeLinks(true) }

// HalfClose ends one direction of all open connections: the receiver sees the end of the stream, and what the sender sends from
// then on is swallowed. The other direction goes on. Heal can't undo it.
func (p *Proxy) HalfClose(dir Direction) {
	for _, l := range p.openLinks() {
		for _, lane := range dir.lanes() {
			l.halfClose(lane)
		}
	}
}

// Close closes the listener and all connections, and waits until all is over. It may be called twice.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	err := p.refuse()
	p.mu.Unlock()
	p.closeLinks(false)
	p.wg.Wait()
	return err
}

func (p *Proxy) openLinks() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []*link
	for l := range p.links {
		list = append(list, l)
	}
	return list
}

func (p *Proxy) closeLinks(reset bool) int {
	list := p.openLinks()
	for _, l := range list {
		l.close(reset)
	}
	return len(list)
}

// await waits until blocked, which is called with p.mu held, says no. It returns false if ctx ends before.
func (p *Proxy) await(ctx context.Context, blocked func() bool) bool {
	for {
		p.mu.Lock()
		wait, changed := blocked(), p.changed
		p.mu.Unlock()
		if !wait {
			return ctx.Err() == nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// take asks how many of n bytes may pass in one write. With cut, the connection is to be reset after them.
func (p *Proxy) take(lane, n int) (allowed int, pause time.Duration, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := &p.faults[lane]
	if f.trickleBytes > 0 {
		n, pause = min(n, f.trickleBytes), f.tricklePause
	}
	if f.cutAfter > 0 {
		n = int(min(int64(n), f.cutAfter))
		f.cutAfter -= int64(n)
		cut = f.cutAfter == 0
	}
	return n, pause, cut
}
