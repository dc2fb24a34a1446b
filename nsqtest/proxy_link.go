package nsqtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	chunkSize = 16 * 1024
	maxChunks = 64 // of one lane on their way; beyond, the sender has to wait as for any full buffer

	proxyDialTimeout = 5 * time.Second
)

// chunk is what one read returned.
type chunk struct {
	data []byte
	err  error     // of the read; the last chunk of a lane has one
	due  time.Time // not to be delivered before
}

// link is one connection through the proxy. Each of its lanes has a goroutine that reads and one that writes.
type link struct {
	proxy  *Proxy
	ctx    context.Context // ends with the link
	cancel context.CancelFunc
	client *net.TCPConn
	halves [lanes]atomic.Bool // closed by HalfClose; written with proxy.mu held
	passed [lanes][]byte      // the last bytes that passed, for HoldAt; each owned by its lane's writer
	server *net.TCPConn       // nil until connected; written with proxy.mu held, before the lanes start
	reset  bool               // how the link was closed; guarded by proxy.mu
}

// serve forwards one connection until both directions have ended.
func (p *Proxy) serve(client *net.TCPConn) {
	l := &link{proxy: p, client: client}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if !p.add(l) {
		client.Close()
		return
	}
	if err := l.connect(); err != nil {
		l.close(true)
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { l.forward(laneToServer, l.client, l.server) })
	wg.Go(func() { l.forward(laneToClient, l.server, l.client) })
	wg.Wait()
	l.close(false)
}

func (p *Proxy) add(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.links[l] = struct{}{}
	return true
}

func (l *link) connect() error {
	if !l.proxy.await(l.ctx, func() bool { return l.proxy.silent }) {
		return l.ctx.Err()
	}
	l.proxy.mu.Lock()
	target := l.proxy.target
	l.proxy.mu.Unlock()

	dialer := net.Dialer{Timeout: proxyDialTimeout}
	nc, err := dialer.DialContext(l.ctx, "tcp", target)
	if err != nil {
		return err
	}
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	// Those who have closed the link or a half meanwhile didn't know of this connection, but the target may have seen it.
	server := nc.(*net.TCPConn)
	if l.ctx.Err() != nil {
		closeConn(server, l.reset)
		return l.ctx.Err()
	}
	if l.halves[laneToServer].Load() {
		server.CloseWrite()
	}
	l.server = server
	return nil
}

// close closes both connections. Only the first call counts.
func (l *link) close(reset bool) {
	l.proxy.mu.Lock()
	first := l.ctx.Err() == nil
	server := l.server
	if first {
		l.reset = reset
		l.cancel()
		delete(l.proxy.links, l)
	}
	l.proxy.mu.Unlock()
	if !first {
		return
	}
	closeConn(l.client, reset)
	if server != nil {
		closeConn(server, reset)
	}
}

func closeConn(nc *net.TCPConn, reset bool) {
	if reset {
		nc.SetLinger(0)
	}
	nc.Close()
}

func (l *link) halfClose(lane int) {
	l.proxy.mu.Lock()
	l.halves[lane].Store(true)
	to := l.client
	if lane == laneToServer {
		to = l.server
	}
	l.proxy.mu.Unlock()
	if to != nil {
		to.CloseWrite()
	}
}

// forward carries one lane until it ends.
func (l *link) forward(lane int, from, to *net.TCPConn) {
	chunks := make(chan chunk, maxChunks)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(chunks)
		l.readLane(lane, from, chunks)
	})
	wg.Go(func() { l.writeLane(lane, to, chunks) })
	wg.Wait()
}

func (l *link) readLane(lane int, from net.Conn, chunks chan<- chunk) {
	f := &l.proxy.faults[lane] // read with proxy.mu held
	buf := make([]byte, chunkSize)
	for {
		if !l.proxy.await(l.ctx, func() bool { return f.stall }) {
			return
		}
		n, err := from.Read(buf)
		l.proxy.mu.Lock()
		due := time.Now().Add(f.latency)
		l.proxy.mu.Unlock()
		select {
		case chunks <- chunk{data: bytes.Clone(buf[:n]), err: err, due: due}:
		case <-l.ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// writeLane delivers until the lane or the link ends.
func (l *link) writeLane(lane int, to *net.TCPConn, chunks <-chan chunk) {
	for {
		select {
		case c, ok := <-chunks:
			if !ok || !sleep(l.ctx, time.Until(c.due)) || !l.deliver(lane, to, c.data) {
				return
			}
			if c.err != nil {
				l.end(lane, to, c.err)
				return
			}
		case <-l.ctx.Done():
			return
		}
	}
}

// deliver writes data in as many pieces as the faults of the moment demand. It returns false if the link has ended.
func (l *link) deliver(lane int, to net.Conn, data []byte) bool {
	f := &l.proxy.faults[lane] // read with proxy.mu held
	for len(data) > 0 {
		swallow, n := false, 0
		if !l.proxy.await(l.ctx, func() bool {
			swallow, n = f.blackHole, l.beforeHold(lane, f.holdAt, data)
			return f.stall || n == 0
		}) {
			return false
		}
		if swallow || l.halves[lane].Load() {
			return true
		}
		n, pause, cut := l.proxy.take(lane, n)
		written, err := to.Write(data[:n])
		l.proxy.bytes[lane].Add(int64(written))
		if err != nil && l.halves[lane].Load() {
			return true
		}
		if err != nil || cut {
			l.close(true)
			return false
		}
		l.remember(lane, data[:n])
		data = data[n:]
		if !sleep(l.ctx, pause) {
			return false
		}
	}
	return true
}

// beforeHold returns how many bytes of data may pass before text, or what is left of it: it may have begun in what has passed.
func (l *link) beforeHold(lane int, text string, data []byte) int {
	if text == "" {
		return len(data)
	}
	begun := l.passed[lane]
	begun = begun[max(0, len(begun)-(len(text)-1)):]
	i := strings.Index(string(begun)+string(data), text)
	if i < 0 {
		return len(data)
	}
	return max(0, i-len(begun))
}

// remembered is how long a text may be that comes in pieces.
const remembered = 64

// remember keeps the end of what has passed.
func (l *link) remember(lane int, data []byte) {
	all := append(l.passed[lane], data[max(0, len(data)-remembered):]...)
	l.passed[lane] = append(l.passed[lane][:0], all[max(0, len(all)-remembered):]...)
}

// end passes on the end of a stream: an orderly one, or a reset.
func (l *link) end(lane int, to *net.TCPConn, err error) {
	f := &l.proxy.faults[lane] // read with proxy.mu held
	if !l.proxy.await(l.ctx, func() bool { return f.stall || f.blackHole }) {
		return
	}
	if !errors.Is(err, io.EOF) {
		l.close(true)
		return
	}
	to.CloseWrite()
}

// sleep waits for d. It returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
