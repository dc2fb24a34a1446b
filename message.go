package nsq

import (
	"encoding/binary"
	"io"
	"sync/atomic"
	"time"
)

// messageHeaderSize is what stands before the body in a message frame: timestamp, attempts and ID.
const messageHeaderSize = 8 + 2 + MsgIDLength

// MessageID names a message. It is unique per nsqd, not over a cluster, and consists of ASCII hex digits.
type MessageID [MsgIDLength]byte

// Message is one delivery of a message by nsqd. Handlers receive it and answer it, once: by what they return, or by
// Finish, Requeue or RequeueWithoutBackoff, from any goroutine. The first answer counts, later ones do nothing.
//
// The message and its Body belong to the handler, which may keep both. The fields must not be changed while another
// goroutine may answer.
//
// See https://nsq.io/clients/tcp_protocol_spec.html#data-format.
type Message struct {
	ID        MessageID
	Body      []byte
	Timestamp int64  // when the message was published, in nanoseconds since 1970
	Attempts  uint16 // deliveries so far, this one included; it wraps to 0 after 65535

	// NSQDAddress is the address that was used to connect to the nsqd, as it was configured or discovered.
	NSQDAddress string

	// Delegate carries out the answers. A Consumer sets it; tests may set their own. Without one, answers do nothing.
	Delegate MessageDelegate

	responded            atomic.Bool
	autoResponseDisabled atomic.Bool

	delivery delivery
}

// delivery is the book-keeping of a message that came over a connection. It is kept per delivery and not looked up by
// message ID when an answer comes: after a timeout nsqd may send the same ID again on the same connection. Only for a
// message made by hand there is nothing else to go by (Conn.own).
type delivery struct {
	conn  *Conn         // the one connection that may carry the answer; nil for a message made by hand
	self  *Message      // the message that came: a program may have copied it
	id    MessageID     // as it came; the exported ID is the user's
	state deliveryState // who has the message; changed by compare-and-swap

	// The fields below are guarded by conn.mu.

	deadline int64    // when nsqd takes the message back, by monotonic(); 0: not known
	limit    int64    // how far TOUCH can move the deadline; 0: not known
	size     int      // of the memory that it takes
	period   uint64   // the backoff period whose probe this is; 0: none
	touched  uint64   // the round of writeLoop that has a TOUCH for it: another one would add nothing
	listed   bool     // counted as unanswered
	newer    *Message // the delivery of the same ID that superseded this one

	hashNext   *Message // next in the bucket of inFlightTable
	prev, next *Message // neighbours in the order of deadlines
}

// deliveryState tells who has a message: only one of a handler and those who drop messages can take it.
type deliveryState struct{ v atomic.Int32 }

const (
	deliveryQueued  int32 = iota // waiting for a handler
	deliveryRunning              // a handler has it, or has had it
	deliveryDropped              // no handler will get it
)

// run claims the message for a handler.
func (s *deliveryState) run() bool { return s.v.CompareAndSwap(deliveryQueued, deliveryRunning) }

// drop claims the message so that no handler gets it any more.
func (s *deliveryState) drop() bool { return s.v.CompareAndSwap(deliveryQueued, deliveryDropped) }

func (s *deliveryState) queued() bool  { return s.v.Load() == deliveryQueued }
func (s *deliveryState) dropped() bool { return s.v.Load() == deliveryDropped }

// MessageDelegate carries out the answers to a message. Consumers provide their own; a test can set one on a Message
// to see what a handler does. OnRequeue receives the delay as it was given, -1 included.
type MessageDelegate interface {
	OnFinish(*Message)
	OnRequeue(m *Message, delay time.Duration, backoff bool)
	OnTouch(*Message)
}

// NewMessage makes a message by hand, with the present time as its timestamp, no attempts and no delegate.
func NewMessage(id MessageID, body []byte) *Message {
	return &Message{ID: id, Body: body, Timestamp: time.Now().UnixNano()}
}

// DisableAutoResponse leaves the answer to the handler's code: what the handler returns then causes neither FIN nor
// REQ. Such a message must be answered by Finish, Requeue or RequeueWithoutBackoff, at any time and from any
// goroutine; until then it counts as in flight.
func (m *Message) DisableAutoResponse() { m.autoResponseDisabled.Store(true) }

// IsAutoResponseDisabled reports whether DisableAutoResponse was called.
func (m *Message) IsAutoResponseDisabled() bool { return m.autoResponseDisabled.Load() }

// HasResponded reports whether the message was answered, also if that answer came too late to be sent.
func (m *Message) HasResponded() bool { return m.responded.Load() }

// Finish sends FIN: the message is done. It does not block on the network, and does nothing on an answered message.
func (m *Message) Finish() {
	if !m.responded.CompareAndSwap(false, true) {
		return
	}
	if m.Delegate != nil {
		m.Delegate.OnFinish(m)
	}
}

// Touch sends TOUCH, which gives the handler another message timeout from now, up to nsqd's max_msg_timeout after the
// delivery. It does not block on the network, and does nothing on an answered message.
func (m *Message) Touch() {
	if m.responded.Load() {
		return
	}
	if m.Delegate != nil {
		m.Delegate.OnTouch(m)
	}
}

// Requeue sends REQ: nsqd delivers the message again after the delay, and this consumer enters or continues its
// backoff. Use RequeueWithoutBackoff to have only the one message wait.
//
// The delay -1 (a nanosecond below zero) stands for Config.DefaultRequeueDelay times Attempts, at most
// Config.MaxRequeueDelay. Other negative delays are taken as 0, which means at once, those over an hour as an hour.
// It does not block on the network, and does nothing on an answered message.
func (m *Message) Requeue(delay time.Duration) { m.requeue(delay, true) }

// RequeueWithoutBackoff is Requeue without an effect on the consumer's backoff.
func (m *Message) RequeueWithoutBackoff(delay time.Duration) { m.requeue(delay, false) }

func (m *Message) requeue(delay time.Duration, backoff bool) {
	if !m.responded.CompareAndSwap(false, true) {
		return
	}
	if m.Delegate != nil {
		m.Delegate.OnRequeue(m, delay, backoff)
	}
}

// WriteTo writes the message as nsqd does in a message frame: timestamp, attempts, ID, body. It makes one Write, whose
// result it returns: the bytes written and the error.
func (m *Message) WriteTo(w io.Writer) (int64, error) {
	buf := make([]byte, messageHeaderSize, messageHeaderSize+len(m.Body))
	binary.BigEndian.PutUint64(buf, uint64(m.Timestamp))
	binary.BigEndian.PutUint16(buf[8:], m.Attempts)
	copy(buf[10:], m.ID[:])
	n, err := w.Write(append(buf, m.Body...))
	return int64(n), err
}

// DecodeMessage decodes the data of a message frame. The Body of the result aliases b. It returns
// ErrShortMessage if b is shorter than the 26 bytes that stand before a body.
func DecodeMessage(b []byte) (*Message, error) {
	m := new(Message)
	if err := m.decodeHeader(b); err != nil {
		return nil, err
	}
	m.Body = b[messageHeaderSize:]
	return m, nil
}

// decodeHeader sets all that stands before the body.
func (m *Message) decodeHeader(b []byte) error {
	if len(b) < messageHeaderSize {
		return ErrShortMessage
	}
	m.Timestamp = int64(binary.BigEndian.Uint64(b))
	m.Attempts = binary.BigEndian.Uint16(b[8:])
	m.ID = MessageID(b[10:messageHeaderSize])
	return nil
}
