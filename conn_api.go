package nsq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// ConnDelegate is told what happens on a Conn that a program made with NewConn. The methods are called by the
// connection's own goroutines, or by those that answer messages, one after the other for each of them: they must not
// block for long.
type ConnDelegate interface {
	// OnResponse gets a response frame that is not a heartbeat.
	OnResponse(*Conn, []byte)
	// OnError gets an error frame. After most of them nsqd closes the connection, see ProtocolError.
	OnError(*Conn, []byte)
	// OnMessage gets a message, which counts as unanswered from here on.
	OnMessage(*Conn, *Message)
	// OnMessageFinished is told of each FIN, before it is sent.
	OnMessageFinished(*Conn, *Message)
	// OnMessageRequeued is told of each REQ, before it is sent.
	OnMessageRequeued(*Conn, *Message)
	// OnBackoff is told of a REQ with backoff.
	OnBackoff(*Conn)
	// OnContinue is told of a REQ without backoff.
	OnContinue(*Conn)
	// OnResume is told of a FIN.
	OnResume(*Conn)
	// OnIOError is told of a read or write error, and of a frame that makes no sense. The connection ends.
	OnIOError(*Conn, error)
	// OnHeartbeat is told of a heartbeat, which the connection answers itself.
	OnHeartbeat(*Conn)
	// OnClose is told that the connection has ended. Answers given later are still told, though not sent.
	OnClose(*Conn)
}

// NewConn returns a connection to the nsqd at addr, which is not made before Connect. Most programs want a Consumer
// instead. With a nil delegate nobody is told of what happens. The config must come from NewConfig, or NewConn panics;
// it must not be changed afterwards.
//
// The program sends SUB and RDY itself, by WriteCommand.
func NewConn(addr string, config *Config, delegate ConnDelegate) *Conn {
	if config == nil || config.checkCreated() != nil {
		panic("Config must be created with NewConfig()")
	}
	owner := &delegateOwner{delegate: delegate}
	c := newConn(addr, config.clone(), owner, connLoggers(addr))
	return c
}

// delegateOwner is the owner of a Conn made by NewConn.
type delegateOwner struct{ delegate ConnDelegate }

func (o *delegateOwner) received(c *Conn, ms *arrivals) {
	for i := range ms.messages {
		m := &ms.messages[i]
		if c.IsClosing() { // it was on its way
			c.giveBack(m)
			continue
		}
		if m.state.run() && o.delegate != nil { // or the connection has ended this very moment, and taken its body
			o.delegate.OnMessage(c, m)
		}
	}
}

func (o *delegateOwner) concerns(answer) bool { return o.delegate != nil }

func (o *delegateOwner) decide(c *Conn, m *Message, a answer) bool {
	switch {
	case a.finish:
		o.delegate.OnMessageFinished(c, m)
		o.delegate.OnResume(c)
	case a.backoff:
		o.delegate.OnMessageRequeued(c, m)
		o.delegate.OnBackoff(c)
	default:
		o.delegate.OnMessageRequeued(c, m)
		o.delegate.OnContinue(c)
	}
	return false
}

func (o *delegateOwner) ranInVain([]MessageID) {}

func (o *delegateOwner) lateAnswer(*Conn, *Message, bool) {}

func (o *delegateOwner) response(c *Conn, data []byte) {
	if o.delegate != nil {
		o.delegate.OnResponse(c, data)
	}
}

func (o *delegateOwner) protocolError(c *Conn, err *ProtocolError, data []byte) {
	c.log.logf(LogLevelError, "protocol error - %s", err)
	if o.delegate != nil {
		o.delegate.OnError(c, data)
	}
}

func (o *delegateOwner) heartbeat(c *Conn) {
	if o.delegate != nil {
		o.delegate.OnHeartbeat(c)
	}
}

func (o *delegateOwner) changed() {}

func (o *delegateOwner) failed(c *Conn, err error, _ bool) {
	if !saidByNSQD(err) {
		c.log.logf(LogLevelError, "IO error - %s", err)
	}
	if o.delegate != nil {
		o.delegate.OnIOError(c, err)
	}
}

// Connect dials nsqd and goes through IDENTIFY, upgrades and AUTH; then the connection is served until it ends. It
// blocks for Config.DialTimeout, and for Config.ReadTimeout for each answer, at most. The response is nil, with a nil
// error, if nsqd answered IDENTIFY with a plain OK. A Conn connects once.
//
// Errors: that of the dial; an ErrIdentify; "Auth Required"; one that begins with "Error authenticating ";
// ErrTLSRefused; a *TimeoutError; ErrAlreadyConnected. errors.As finds a *ProtocolError behind refusals.
func (c *Conn) Connect() (*IdentifyResponse, error) {
	if !c.connecting.CompareAndSwap(false, true) {
		return nil, ErrAlreadyConnected
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	c.mu.Lock()
	c.stopConnect = cancel
	ended := c.ended
	c.mu.Unlock()
	if ended {
		return nil, ErrClosing
	}
	c.log.logf(LogLevelInfo, "connecting to nsqd")
	resp, err := c.handshake(ctx)
	if err == nil {
		err = c.begin()
	}
	if err != nil {
		c.connecting.Store(false)
		return nil, err
	}
	c.wg.Go(func() { _ = c.readLoop() })
	c.wg.Go(c.closeWhenSettled)
	go func() {
		c.wg.Wait()
		if o, ok := c.owner.(*delegateOwner); ok && o.delegate != nil {
			o.delegate.OnClose(c)
		}
	}()
	return resp, nil
}

// Close closes the connection: at once if no message is unanswered, else when the last one is answered or has expired.
// No new ones are delivered meanwhile: what still comes goes back to nsqd. Close does not wait, and may be called at any
// time. It breaks off a Connect that is under way. The error is always nil.
func (c *Conn) Close() error {
	c.closing.Store(true)
	c.mu.Lock()
	begun := !c.since.IsZero()
	if begun && c.allowed > 0 && !c.ended {
		c.out = appendReady(c.out, 0) // messages come otherwise, and Close would never be done
		c.allowed = 0
	}
	c.mu.Unlock()
	if !begun {
		c.end(nil)
		return nil
	}
	c.signal()
	select {
	case c.settled <- struct{}{}:
	default:
	}
	return nil
}

// closeWhenSettled ends a connection after Close. Messages that nobody answers hold it up until they expire.
func (c *Conn) closeWhenSettled() {
	var expiry <-chan time.Time
	for {
		select {
		case <-c.settled: // or Close was called
		case <-expiry:
		case <-c.done:
			return
		}
		c.expire(monotonic())
		c.mu.Lock()
		busy := c.table.live > 0 || len(c.out) > 0 || c.writing
		deadline := c.table.nextDeadline()
		c.mu.Unlock()
		if !busy {
			c.hangUp(context.Background(), hangUpBusy)
			c.end(nil)
			return
		}
		expiry = nil
		if deadline != 0 {
			expiry = time.After(time.Until(instant(deadline)))
		}
	}
}

// IsClosing reports whether the connection has ended or is about to.
func (c *Conn) IsClosing() bool { return c.closing.Load() }

// RDY returns the RDY that was asked for last. It is what nsqd knows, or will after the next write.
func (c *Conn) RDY() int64 { return c.rdy.Load() }

// LastRDY returns the same as RDY.
func (c *Conn) LastRDY() int64 { return c.rdy.Load() }

// SetRDY notes a RDY that a program sends itself, by WriteCommand. It sends nothing.
func (c *Conn) SetRDY(rdy int64) { c.noteRDY(rdy) }

// MaxRDY returns the highest RDY this nsqd takes; 2500 until it has told.
func (c *Conn) MaxRDY() int64 { return c.maxRDY.Load() }

// LastRdyTime returns when RDY was last set above 0, the zero time if never.
func (c *Conn) LastRdyTime() time.Time { return instant(c.lastRDY.Load()) }

// LastMessageTime returns when a message came last; until then, when the Conn was made.
func (c *Conn) LastMessageTime() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lastRead == 0 {
		return c.created
	}
	return instant(c.lastRead)
}

// RemoteAddr returns the address of nsqd's end; nil before Connect.
func (c *Conn) RemoteAddr() net.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.remote
}

// String returns the address as it was given.
func (c *Conn) String() string { return c.addr }

// Read reads from below the protocol, through TLS if that was negotiated. A connected Conn reads by itself, so both get a
// part each, and the connection will hardly survive that: it is here for programs that know Conn as an io.Reader. It
// blocks until bytes come or the connection ends. Without a connection it returns ErrNotConnected; with compression,
// whose decoder has one user, it is an error.
func (c *Conn) Read(p []byte) (int, error) {
	switch t := c.layers(); {
	case t == nil:
		return 0, ErrNotConnected
	case t.flush != nil:
		return 0, errCompressedRead
	default:
		return t.r.Read(p)
	}
}

var errCompressedRead = errors.New("nsq: Read of a compressed connection, which reads by itself")

// Write hands raw bytes to the connection's writer, behind what is queued, and waits until they are written. Bounds and
// errors are those of WriteCommand.
func (c *Conn) Write(p []byte) (int, error) {
	if err := c.writeAndWait(func(out []byte) []byte { return append(out, p...) }); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteCommand sends a command, and whatever is queued before it, and waits until it is written: for
// Config.WriteTimeout at most. It may be called from many goroutines. A failure ends the connection and is reported to
// OnIOError too. Without a connection it returns ErrNotConnected. A line end in the name or a parameter is an
// error, and nothing is sent.
func (c *Conn) WriteCommand(cmd *Command) error {
	if line := cmd.String(); strings.Contains(line, "\n") { // a topic from elsewhere, say: nsqd would take the rest for another command
		return fmt.Errorf("nsq: a command with a line end in it: %s", printable(cutText(line)))
	}
	switch string(cmd.Name) {
	case "RDY":
		if len(cmd.Params) == 1 {
			if n, err := strconv.ParseInt(string(cmd.Params[0]), 10, 64); err == nil {
				c.allow(n)
			}
		}
	case "CLS":
		c.allow(0)
	}
	return c.writeAndWait(func(out []byte) []byte { return appendCommand(out, cmd) })
}

// Flush waits until all that is queued is written. Bounds and errors are those of WriteCommand.
func (c *Conn) Flush() error {
	return c.writeAndWait(func(out []byte) []byte { return out })
}

// allow notes that a program asks for so many messages itself.
func (c *Conn) allow(rdy int64) {
	c.mu.Lock()
	c.allowed = rdy
	c.highestRDY = max(c.highestRDY, rdy)
	c.mu.Unlock()
}

// writeAndWait appends to what writeLoop writes next, and waits for that.
func (c *Conn) writeAndWait(add func(out []byte) []byte) error {
	result := make(chan error, 1)
	c.mu.Lock()
	if c.ended || c.since.IsZero() {
		c.mu.Unlock()
		return ErrNotConnected
	}
	c.out = add(c.out)
	c.waiters = append(c.waiters, result)
	c.mu.Unlock()
	c.signal()
	return <-result
}

func (c *Conn) layers() *transport {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || c.since.IsZero() {
		return nil
	}
	return c.transport
}

// SetLogger sends the connection's log lines to l, from a level on. The format has one %s for the address; empty means
// "(%s)". A nil logger silences the connection.
func (c *Conn) SetLogger(l logger, lvl LogLevel, format string) {
	c.log.setWithPrefix(l, lvl, logPrefix(format, c.addr))
}

// SetLoggerForLevel sends the log lines of one level to l.
func (c *Conn) SetLoggerForLevel(l logger, lvl LogLevel, format string) {
	c.log.setForLevelWithPrefix(l, lvl, logPrefix(format, c.addr))
}

// SetLoggerLevel sets the level from which on lines are logged.
func (c *Conn) SetLoggerLevel(lvl LogLevel) { c.log.setLevel(lvl) }
