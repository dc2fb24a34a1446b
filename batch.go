package nsq

// messageBatch turns the frames of one read into messages. Bodies and messages are carved out of pieces of memory made
// for a batch, to have two allocations instead of two for each (BenchmarkDecode).
//
// A handler may keep a message or a body for ever, and would pin what lies beside it. So pieces are made to fit, stay
// small, and large bodies get memory of their own.
type messageBatch struct {
	frames [][]byte // data of message frames; only valid until the next read unless owned
	owned  []byte   // the data of a large frame that nobody else uses, always the last of the batch
	bodies int      // bytes of bodies to copy
}

const (
	maxBatch       = 64
	maxBatchBodies = 16 << 10
)

// full tells whether a frame with this data has no room in the batch.
func (b *messageBatch) full(data []byte) bool {
	return b.owned != nil || len(b.frames) > 0 && (len(b.frames) == maxBatch || b.bodies+len(data) > maxBatchBodies)
}

func (b *messageBatch) empty() bool { return len(b.frames) == 0 }

// add takes the data of a message frame. Owned data is not copied.
func (b *messageBatch) add(data []byte, owned bool) error {
	if len(data) < messageHeaderSize {
		return ErrShortMessage
	}
	b.frames = append(b.frames, data)
	if owned {
		b.owned = data
	} else {
		b.bodies += len(data) - messageHeaderSize
	}
	return nil
}

// take returns the messages and empties the batch.
func (b *messageBatch) take() []*Message {
	memory := make([]byte, 0, b.bodies)
	messages := make([]Message, len(b.frames))
	ms := make([]*Message, len(b.frames))
	for i, data := range b.frames {
		m := &messages[i]
		_ = m.decodeHeader(data) // add has looked at the length
		body := data[messageHeaderSize:]
		if i < len(b.frames)-1 || b.owned == nil {
			start := len(memory)
			memory = append(memory, body...)
			body = memory[start:len(memory):len(memory)]
		}
		m.Body = body
		ms[i] = m
	}
	clear(b.frames)
	b.frames, b.owned, b.bodies = b.frames[:0], nil, 0
	return ms
}
