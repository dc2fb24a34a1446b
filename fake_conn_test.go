package nsq

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"time"
)

// fakeState is where a connection is in the protocol.
type fakeState int

const (
	fakeInit fakeState = iota
	fakeSubscribed
	fakeClosing // after CLS
	fakeFailed  // a fatal error is on its way; nothing more is done
)

// fakeConn is a connection to a fake nsqd. Three goroutines serve it: readLoop parses commands, processLoop lets them
// take effect, and sendLoop writes all frames, so that the order of the log is the order on the wire.
type fakeConn struct {
	nsqd   *fakeNSQD
	number int      // in the cluster, from 1
	raw    net.Conn // the transport
	wire   *fakeWire

	// Owned by readLoop and sendLoop. Upgrades, in sendLoop, change them while readLoop waits for resume.
	in    *bufio.Reader
	out   io.Writer
	plain net.Conn // what compression goes on top of: the wire, or TLS

	inbox  chan struct{} // size 1: commands has got longer
	wake   chan struct{} // size 1: there may be something to send
	resume chan struct{} // IDENTIFY is dealt with, upgrades included
	done   chan struct{} // closed with the connection

	// guarded by cluster.mu
	state      fakeState
	closed     bool
	identified bool
	authorized bool
	rdy        int64
	inFlight   int
	msgTimeout time.Duration
	heartbeat  time.Duration // 0 is off
	lastBeat   time.Time
	lastRead   time.Time
	commands   []fakeCommand // read, not yet processed
	busy       bool          // a command is taking effect
	outbox     []fakeOut     // to be sent ahead of messages
	owed       int           // messages to be sent whatever RDY and state say, if they are there by owedUntil
	owedUntil  time.Time
}

// fakeCommand is a command as read.
type fakeCommand struct {
	line string
	body []byte
	read time.Time

	// What was read was no command.
	refusal string // the error frame for it
	end     error  // nothing more can be read
}

func (cmd fakeCommand) words() []string { return strings.Split(cmd.line, " ") }
func (cmd fakeCommand) name() string    { return cmd.words()[0] }

// fakeOut is something for the send loop to do: a frame to send, or run.
type fakeOut struct {
	entry  fakeEntry // goes into the log when the frame is sent; no Kind, no entry
	bytes  []byte
	run    func() error
	hangUp string // close the connection afterwards, for this reason
}

func newFakeConn(n *fakeNSQD, number int, nc net.Conn) *fakeConn {
	now := time.Now()
	c := &fakeConn{
		nsqd: n, number: number, raw: nc,
		inbox:      make(chan struct{}, 1),
		wake:       make(chan struct{}, 1),
		resume:     make(chan struct{}, 1),
		done:       make(chan struct{}),
		msgTimeout: n.behaviour.msgTimeout,
		heartbeat:  n.behaviour.heartbeat,
		lastBeat:   now,
		lastRead:   now,
	}
	c.wire = &fakeWire{Conn: nc, conn: c}
	c.plain, c.in, c.out = c.wire, bufio.NewReaderSize(c.wire, maxFakeLine), c.wire
	return c
}

// logLocked writes down an entry about this connection.
func (c *fakeConn) logLocked(e fakeEntry) {
	e.NSQD, e.Conn, e.RDY, e.InFlight = c.nsqd.addr, c.number, c.rdy, c.inFlight
	c.nsqd.cluster.appendLocked(e)
}

// Limits of nsqd.
const (
	maxFakeLine = 16 << 10
	maxFakeBody = 5 << 20
)

// readLoop reads commands until the connection ends.
func (c *fakeConn) readLoop() {
	magic := make([]byte, 4)
	if _, err := io.ReadFull(c.in, magic); err != nil {
		c.receive(fakeCommand{end: err})
		return
	}
	if string(magic) != "  V2" {
		c.receive(fakeCommand{refusal: "E_BAD_PROTOCOL"})
		return
	}
	for {
		cmd := c.readCommand()
		c.receive(cmd)
		if cmd.end != nil || cmd.refusal != "" {
			return
		}
		if cmd.name() == "IDENTIFY" && !c.waitResume() {
			return
		}
	}
}

// receive hands a command to processLoop.
func (c *fakeConn) receive(cmd fakeCommand) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	cmd.read = time.Now()
	c.lastRead = cmd.read
	c.commands = append(c.commands, cmd)
	fakeSignal(c.inbox)
}

func (c *fakeConn) waitResume() bool {
	select {
	case <-c.resume:
		return true
	case <-c.done:
		return false
	}
}

func (c *fakeConn) readCommand() fakeCommand {
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return fakeCommand{end: err}
	}
	cmd := fakeCommand{line: strings.TrimSuffix(string(line[:len(line)-1]), "\r")}
	switch cmd.name() {
	case "IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB":
		return c.readBody(cmd)
	}
	return cmd
}

func (c *fakeConn) readBody(cmd fakeCommand) fakeCommand {
	var size [4]byte
	if _, err := io.ReadFull(c.in, size[:]); err != nil {
		return fakeCommand{end: err}
	}
	n := int32(binary.BigEndian.Uint32(size[:]))
	if n <= 0 || n > maxFakeBody {
		cmd.refusal = fmt.Sprintf("E_BAD_BODY %s invalid body size %d", cmd.name(), n)
		return cmd
	}
	cmd.body = make([]byte, n)
	if _, err := io.ReadFull(c.in, cmd.body); err != nil {
		return fakeCommand{end: err}
	}
	return cmd
}

// processLoop lets commands take effect, each at its time.
func (c *fakeConn) processLoop() {
	for {
		cmd, delay, ok := c.nextCommand()
		if !ok {
			return
		}
		if !c.pause(time.Until(cmd.read.Add(delay))) {
			return
		}
		c.process(cmd)
		c.processed()
	}
}

// nextCommand waits for the next command. It reports false once the connection is closed.
func (c *fakeConn) nextCommand() (cmd fakeCommand, delay time.Duration, ok bool) {
	for {
		if cmd, delay, ok := c.takeCommand(); ok {
			return cmd, delay, true
		}
		select {
		case <-c.inbox:
		case <-c.done:
			return fakeCommand{}, 0, false
		}
	}
}

func (c *fakeConn) takeCommand() (cmd fakeCommand, delay time.Duration, ok bool) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	if len(c.commands) == 0 {
		return fakeCommand{}, 0, false
	}
	cmd = c.commands[0]
	c.commands = c.commands[1:]
	return cmd, c.nsqd.behaviour.readDelay, true
}

// processed lets the send loop flush what was glued together.
func (c *fakeConn) processed() {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	c.busy = false
	fakeSignal(c.wake)
}

// pause waits for d. It reports false once the connection is closed.
func (c *fakeConn) pause(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.done:
		return false
	}
}

// sendLoop writes frames, runs upgrades and sends heartbeats.
func (c *fakeConn) sendLoop() {
	for {
		out, ok := c.nextOut()
		var err error
		switch {
		case ok:
			err = c.perform(out)
		case c.idle():
			if err = c.wire.flush(); err == nil && !c.waitOut() {
				return
			}
		case !c.waitOut():
			return
		}
		if err != nil {
			c.closeFor(fmt.Sprintf("nsqd failed: %v", err))
			return
		}
	}
}

// perform does what out says.
func (c *fakeConn) perform(out fakeOut) error {
	if out.run != nil {
		return out.run()
	}
	if len(out.bytes) > 0 {
		if err := c.writeThrough(out.bytes); err != nil {
			return err
		}
	}
	if out.hangUp == "" {
		return nil
	}
	if err := c.wire.flush(); err != nil {
		return err
	}
	c.closeFor(out.hangUp)
	return nil
}

// idle tells whether no command is taking effect, so that nothing is about to be added to what was glued together.
func (c *fakeConn) idle() bool {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return !c.busy
}

// nextOut returns what is to be sent next, if there is anything, and writes it down.
func (c *fakeConn) nextOut() (fakeOut, bool) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	b := &c.nsqd.behaviour
	switch {
	case c.closed, b.silent:
		return fakeOut{}, false
	case c.givesUpLocked():
		return fakeOut{hangUp: "client is silent"}, true
	case len(c.outbox) > 0:
		out := c.outbox[0]
		c.outbox = c.outbox[1:]
		if out.entry.Kind != 0 {
			c.logLocked(out.entry)
		}
		return out, true
	case c.beatDueLocked():
		out := fakeFrameOut(entryResponse, 0, []byte("_heartbeat_"))
		c.logLocked(out.entry)
		return out, true
	case c.mayDeliverLocked():
		return c.deliverLocked(c.nsqd.takeLocked()), true
	}
	return fakeOut{}, false
}

// patienceLocked returns when nsqd hangs up on a client that stays silent, two heartbeat intervals after its last command.
// It reports false if the client has a reason for its silence.
func (c *fakeConn) patienceLocked() (time.Time, bool) {
	excused := c.heartbeat == 0 || c.nsqd.behaviour.mute() || !c.nsqd.readsLocked()
	return c.lastRead.Add(2 * c.heartbeat), !excused
}

func (c *fakeConn) givesUpLocked() bool {
	end, ok := c.patienceLocked()
	return ok && !time.Now().Before(end)
}

// beatDueLocked tells whether a heartbeat is to be sent now.
func (c *fakeConn) beatDueLocked() bool {
	if c.heartbeat == 0 || time.Since(c.lastBeat) < c.heartbeat {
		return false
	}
	c.lastBeat = time.Now()
	return !c.nsqd.behaviour.noHeartbeats
}

// mayDeliverLocked applies RDY: a ceiling on messages in flight.
func (c *fakeConn) mayDeliverLocked() bool {
	b := &c.nsqd.behaviour
	if !c.nsqd.waitingLocked() {
		return false
	}
	if c.owed > 0 && c.state != fakeFailed && !time.Now().After(c.owedUntil) {
		c.owed--
		return true
	}
	if c.state != fakeSubscribed || b.paused {
		return false
	}
	ceiling := c.rdy + int64(b.overRDY)
	return int64(c.inFlight) < ceiling
}

// oweLocked has count messages sent that should not be any more. They have to be there soon: late messages are those
// that nsqd had in its hands already.
func (c *fakeConn) oweLocked(count int) {
	const soon = 10 * time.Millisecond
	c.owed, c.owedUntil = count, time.Now().Add(soon)
	fakeSignal(c.wake)
}

// deliverLocked puts m in flight and returns its frame.
func (c *fakeConn) deliverLocked(m *fakeMessage) fakeOut {
	if m.attempts < math.MaxUint16 {
		m.attempts++
	}
	c.nsqd.beginLocked(c, m)
	out := fakeMessageOut(m)
	c.logLocked(out.entry)
	return out
}

// waitOut waits until there may be something to send. It reports false once the connection is closed.
func (c *fakeConn) waitOut() bool {
	var clock <-chan time.Time
	if due, ok := c.nextDue(); ok {
		timer := time.NewTimer(time.Until(due))
		defer timer.Stop()
		clock = timer.C
	}
	select {
	case <-c.wake:
	case <-clock:
	case <-c.done:
		return false
	}
	return true
}

// nextDue returns when the send loop has to look at the clock again, if ever.
func (c *fakeConn) nextDue() (time.Time, bool) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	if c.heartbeat == 0 || c.nsqd.behaviour.silent {
		return time.Time{}, false
	}
	due := c.lastBeat.Add(c.heartbeat)
	if end, ok := c.patienceLocked(); ok && end.Before(due) {
		due = end
	}
	return due, true
}

// waitReading waits until the fake reads. It reports false once the connection is closed.
func (c *fakeConn) waitReading() bool {
	c.nsqd.cluster.mu.Lock()
	reading := c.nsqd.reading
	c.nsqd.cluster.mu.Unlock()
	select {
	case <-reading:
		return true
	case <-c.done:
		return false
	}
}

func (c *fakeConn) segmentSize() int {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return c.nsqd.behaviour.segment
}

func (c *fakeConn) heartbeatInterval() time.Duration {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return c.heartbeat
}

// fakeFrame encodes a frame.
func fakeFrame(frameType int32, data []byte) []byte {
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(data)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(frameType))
	return append(frame, data...)
}

func fakeFrameOut(kind fakeKind, frameType int32, data []byte) fakeOut {
	entry := fakeEntry{Kind: kind, Line: string(data)}
	if kind == entryRaw {
		entry = fakeEntry{Kind: kind, Body: data}
	}
	return fakeOut{entry: entry, bytes: fakeFrame(frameType, data)}
}

func fakeMessageOut(m *fakeMessage) fakeOut {
	data := binary.BigEndian.AppendUint64(nil, uint64(m.timestamp.UnixNano()))
	data = binary.BigEndian.AppendUint16(data, m.attempts)
	data = append(data, m.id...)
	data = append(data, m.body...)
	return fakeOut{
		entry: fakeEntry{Kind: entryMessage, ID: m.id, Attempts: m.attempts, Body: m.body},
		bytes: fakeFrame(2, data),
	}
}

// pushLocked leaves something for the send loop.
func (c *fakeConn) pushLocked(out fakeOut) {
	c.outbox = append(c.outbox, out)
	fakeSignal(c.wake)
}

func (c *fakeConn) push(out fakeOut) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	c.pushLocked(out)
}

// Frames by hand, behind what is to be sent already. None of these methods blocks.

// sendFrame sends a frame of any type.
func (c *fakeConn) sendFrame(frameType int32, data []byte) {
	c.push(fakeFrameOut(entryRaw, frameType, data))
}

func (c *fakeConn) sendResponse(text string) { c.push(fakeFrameOut(entryResponse, 0, []byte(text))) }
func (c *fakeConn) sendHeartbeat()           { c.sendResponse("_heartbeat_") }

// sendError sends an error frame and leaves the connection open, whatever the error.
func (c *fakeConn) sendError(text string) { c.push(fakeFrameOut(entryError, 1, []byte(text))) }

// sendRaw sends bytes as they are, through TLS and compression.
func (c *fakeConn) sendRaw(p []byte) {
	c.push(fakeOut{entry: fakeEntry{Kind: entryRaw, Body: p}, bytes: p})
}

// sendSize announces a frame of any size, and sends nothing of it.
func (c *fakeConn) sendSize(size int32) {
	c.sendRaw(binary.BigEndian.AppendUint32(nil, uint32(size)))
}

// sendMessage sends a message whatever RDY says. It is in flight from then on, so it can be answered and times out. An
// id that is in flight already is sent again: only the new delivery can be answered.
func (c *fakeConn) sendMessage(id string, attempts uint16, body []byte) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	m := &fakeMessage{id: id, body: body, timestamp: time.Now(), attempts: attempts}
	c.nsqd.beginLocked(c, m)
	c.pushLocked(fakeMessageOut(m))
}

// resend sends a message that is in flight on this connection once more, attempts going up, as nsqd does after a
// timeout of which the client does not know.
func (c *fakeConn) resend(id string) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	d, err := c.nsqd.deliveryLocked(c, id)
	if err != nil {
		panic(fmt.Sprintf("resend %s: %v", id, err))
	}
	d.message.attempts++
	c.nsqd.beginLocked(c, d.message)
	c.pushLocked(fakeMessageOut(d.message))
}

// deliver sends up to count waiting messages whatever RDY and the state of the connection say.
func (c *fakeConn) deliver(count int) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	c.oweLocked(count)
}

// close hangs up once all is sent that is to be sent already.
func (c *fakeConn) close() { c.push(fakeOut{hangUp: "nsqd hung up"}) }

// closeMidFrame sends a part of a message and hangs up.
func (c *fakeConn) closeMidFrame() {
	c.push(fakeOut{entry: fakeEntry{Kind: entryRaw, Body: fakeHalfFrame}, bytes: fakeHalfFrame, hangUp: "nsqd hung up in mid-frame"})
}

// closeWrite ends the direction towards the client once all is sent. Commands are read as before.
func (c *fakeConn) closeWrite() {
	c.push(fakeOut{run: func() error {
		err := c.wire.flush()
		closeFakeSending(c.raw)
		return err
	}})
}

// drop resets the connection: what is on its way is lost.
func (c *fakeConn) drop() {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	c.dropLocked()
}

func (c *fakeConn) dropLocked() {
	if !c.closed {
		resetFakeTransport(c.raw)
	}
	c.closeLocked("reset by nsqd")
}

func (c *fakeConn) closeFor(reason string) {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	c.closeLocked(reason)
}

// closeLocked ends the connection. What is in flight stays so until its timeout.
func (c *fakeConn) closeLocked(reason string) {
	if c.closed {
		return
	}
	c.closed = true
	c.rdy = 0
	close(c.done)
	c.raw.Close()
	c.nsqd.conns = slices.DeleteFunc(c.nsqd.conns, func(open *fakeConn) bool { return open == c })
	c.logLocked(fakeEntry{Kind: entryClosed, Line: reason})
}

// fakeClosedReason words the end of the client's stream.
func fakeClosedReason(err error) string {
	if errors.Is(err, io.EOF) {
		return "client closed"
	}
	return "client failed: " + err.Error()
}

// sent returns the lines of the commands read on this connection but those whose name is in except.
func (c *fakeConn) sent(except ...string) []string {
	return fakeCommandLines(c.nsqd.cluster.snapshot(byConn(c.number)), except)
}

func (c *fakeConn) subscribed() bool {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return c.state == fakeSubscribed
}

// currentRDY returns the RDY in effect.
func (c *fakeConn) currentRDY() int64 {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return c.rdy
}

// unanswered returns how many messages are in flight on this connection, also once it is closed.
func (c *fakeConn) unanswered() int {
	c.nsqd.cluster.mu.Lock()
	defer c.nsqd.cluster.mu.Unlock()
	return c.inFlight
}

// clientWrites returns how many writes the client's end of an in-memory transport has made.
func (c *fakeConn) clientWrites() int { return c.raw.(*fakeStream).in.writesSoFar() }
