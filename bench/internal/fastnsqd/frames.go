package fastnsqd

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/rdyloop/nsq"
)

// A message's ID is idPrefix and its number in eight hex digits.
const (
	idPrefix    = "0f5a1b2c"
	maxMessages = 1 << 32
)

// writeSize is about how much goes out in one write.
const writeSize = 128 << 10

// frames is a buffer of message frames, complete but for their IDs.
type frames struct {
	buf  []byte
	size int // of a frame
}

const idOffset = 8 + 8 + 2 // behind size and type of the frame, timestamp and attempts

func newFrames(body []byte) *frames {
	data := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
	data = binary.BigEndian.AppendUint16(data, 1) // attempts
	data = append(data, idPrefix+"00000000"...)
	data = append(data, body...)
	frame := appendFrame(nil, nsq.FrameTypeMessage, data)
	f := &frames{size: len(frame)}
	for range max(1, writeSize/len(frame)) {
		f.buf = append(f.buf, frame...)
	}
	return f
}

// most is how many frames there are room for.
func (f *frames) most() int { return len(f.buf) / f.size }

// from returns the frames of n messages, numbered from first on. They are good until the next call.
func (f *frames) from(first int64, n int) []byte {
	for i := range n {
		at := i*f.size + idOffset + len(idPrefix)
		putHex(f.buf[at:at+8], uint32(first)+uint32(i))
	}
	return f.buf[:n*f.size]
}

var hexPairs = func() (pairs [256][2]byte) {
	for i := range pairs {
		copy(pairs[i][:], fmt.Sprintf("%02x", i))
	}
	return pairs
}()

func putHex(b []byte, n uint32) {
	_ = b[7]
	for i := 3; i >= 0; i-- {
		pair := &hexPairs[byte(n)]
		b[2*i], b[2*i+1] = pair[0], pair[1]
		n >>= 8
	}
}

const noDigit = 0xff

var hexDigits = func() (digits [256]byte) {
	for i := range digits {
		digits[i] = noDigit
	}
	for i, c := range []byte("0123456789abcdef") {
		digits[c] = byte(i)
	}
	return digits
}()

// messageNumber is the number in an ID, if it is one of ours.
func messageNumber(id []byte) (n int64, ok bool) {
	if len(id) != 16 || string(id[:8]) != idPrefix {
		return 0, false
	}
	var bad byte
	for _, c := range id[8:] {
		d := hexDigits[c]
		bad |= d
		n = n<<4 | int64(d&0xf)
	}
	return n, bad != noDigit
}
