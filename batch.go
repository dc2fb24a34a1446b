package nsq

import (
	"bytes"
	"sync/atomic"
)

// arrivals are messages that came together. Handlers take them one by one.
type arrivals struct {
	conn     *Conn
	messages []Message
	deadline int64        // when nsqd takes them back, by monotonic(); 0: not known. A TOUCH moves that of a message alone
	next     *arrivals    // in the inbox
	taken    atomic.Int64 // so many went to handlers; more than there are once somebody found none left
}

// take returns the next message, nil if there is none.
func (a *arrivals) take() *Message {
	if a.left() == 0 {
		return nil
	}
	if i := a.taken.Add(1); i <= int64(len(a.messages)) {
		return &a.messages[i-1]
	}
	return nil
}

// left is how many messages are there to take.
func (a *arrivals) left() int { return max(0, len(a.messages)-int(a.taken.Load())) }

// dropped tells whether no handler will get any of them.
func (a *arrivals) dropped() bool {
	for i := range a.messages {
		if !a.messages[i].state.dropped() {
			return false
		}
	}
	return true
}

// messageBatch turns the frames of one read into messages. Bodies and messages are carved out of pieces of memory made
// for a batch, to have a few allocations instead of two for each message (BenchmarkDecode).
//
// A handler may keep a message or a body for ever, and would pin what lies beside it. So pieces are made to fit, stay
// small, and large bodies get memory of their own.
type messageBatch struct {
	frames [][]byte // data of message frames; only valid until the next read
	bodies [][]byte // those in frames, which have to be copied
	copied int      // their bytes
	large  []byte   // the body of a large frame: it is nobody else's
	head   [messageHeaderSize]byte
}

const (
	maxBatch       = 64
	maxBatchBodies = 48 << 10
)

// full tells whether a frame has no room in the batch. A large body has a batch for itself.
func (b *messageBatch) full(data, body []byte) bool {
	return len(b.frames) > 0 &&
		(body != nil || b.large != nil || len(b.frames) == maxBatch || b.copied+len(data) > maxBatchBodies)
}

func (b *messageBatch) empty() bool { return len(b.frames) == 0 }

// add takes a message frame as the frameReader gave it: the body of a large one comes apart and is not copied.
func (b *messageBatch) add(data, body []byte) error {
	if len(data) < messageHeaderSize {
		return ErrShortMessage
	}
	if body != nil {
		b.head, b.large = [messageHeaderSize]byte(data), body
		b.frames = append(b.frames, b.head[:])
		return nil
	}
	b.frames = append(b.frames, data)
	b.bodies = append(b.bodies, data[messageHeaderSize:])
	b.copied += len(data) - messageHeaderSize
	return nil
}

// take returns the messages and empties the batch.
func (b *messageBatch) take() *arrivals {
	memory := bytes.Join(b.bodies, nil) // which unlike make and copy does not clear it first
	if memory == nil {
		memory = []byte{} // a body without bytes is empty, not nil, as everywhere
	}
	messages := make([]Message, len(b.frames))
	for i, data := range b.frames {
		m := &messages[i]
		_ = m.decodeHeader(data) // add has looked at the length
		if i < len(b.bodies) {
			n := len(b.bodies[i])
			m.Body, memory = memory[:n:n], memory[n:]
		} else {
			m.Body = b.large
		}
	}
	clear(b.frames)
	clear(b.bodies)
	b.frames, b.bodies, b.copied, b.large = b.frames[:0], b.bodies[:0], 0, nil
	return &arrivals{messages: messages}
}
