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

	state messageState // stands here because here it costs no memory

	// NSQDAddress is the address that was used to connect to the nsqd, as it was configured or discovered.
	NSQDAddress string

	// Delegate carries out the answers. A Consumer sets it; tests may set their own. Without one, answers do nothing.
	Delegate MessageDelegate

	// ref is what the answer belongs to, by the connection's inFlightTable, where all else about the delivery lies. It is
	// kept per delivery and not looked up by message ID when the answer comes: after a timeout nsqd may send the same ID
	// again on the same connection. Only for a message made by hand there is nothing else to go by (Conn.live).
	ref deliveryRef
}

// messageState is what has become of a message, in one word to keep messages small.
type messageState struct{ bits atomic.Uint32 }

const (
	messageTaken        uint32 = 1 << iota // by a handler, or dropped: it waits no more
	messageDropped                         // no handler will get it
	messageAnswered                        // or too late for an answer
	messageAutoDisabled                    // DisableAutoResponse was called
)

func (s *messageState) has(bit uint32) bool { return s.bits.Load()&bit != 0 }

// set sets a bit and reports whether it was not set before. If it was, nothing is written: a handler may be copying the
// message.
func (s *messageState) set(bit uint32) bool { return !s.has(bit) && s.bits.Or(bit)&bit == 0 }

// run claims the message for a handler: only one of handlers and those who drop messages can take it.
func (s *messageState) run() bool { return s.set(messageTaken) }

// drop claims the message so that no handler gets it any more.
func (s *messageState) drop() bool { return s.set(messageTaken) && s.set(messageDropped) }

func (s *messageState) queued() bool  { return !s.has(messageTaken) }
func (s *messageState) dropped() bool { return s.has(messageDropped) }

// answer reports whether this is the first answer.
func (s *messageState) answer() bool { return s.set(messageAnswered) }

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
func (m *Message) DisableAutoResponse() { m.state.set(messageAutoDisabled) }

// IsAutoResponseDisabled reports whether DisableAutoResponse was called.
func (m *Message) IsAutoResponseDisabled() bool { return m.state.has(messageAutoDisabled) }

// HasResponded reports whether the message was answered, also if that answer came too late to be sent.
func (m *Message) HasResponded() bool { return m.state.has(messageAnswered) }

// Finish sends FIN: the message is done. It does not block on the network, and does nothing on an answered message.
func (m *Message) Finish() {
	if !m.state.answer() {
		return
	}
	if m.Delegate != nil {
		m.Delegate.OnFinish(m)
	}
}

// Touch sends TOUCH, which gives the handler another message timeout from now, up to nsqd's max_msg_timeout after the
// delivery. It does not block on the network, and does nothing on an answered message.
func (m *Message) Touch() {
	if m.HasResponded() {
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
	if !m.state.answer() {
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
