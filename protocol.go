package nsq

import (
	"encoding/binary"
	"io"
	"strings"
)

// The magic is what a client sends first on a connection. Consumers and producers talk V2 to
// nsqd; V1 is what nsqd itself talks to nsqlookupd.
var (
	MagicV1 = []byte("  V1")
	MagicV2 = []byte("  V2")
)

// The types of the frames that nsqd sends.
const (
	FrameTypeResponse int32 = 0 // OK, CLOSE_WAIT, _heartbeat_, or the JSON answer to IDENTIFY and AUTH
	FrameTypeError    int32 = 1 // see ProtocolError
	FrameTypeMessage  int32 = 2 // see DecodeMessage
)

// The states of a producer's connection.
const (
	StateInit = iota
	StateDisconnected
	StateConnected
)

// MsgIDLength is the number of bytes of a MessageID.
const MsgIDLength = 16

const (
	frameTypeLength = 4 // part of a frame's size field, as nsqd counts it

	// defaultMaxFrame is the largest size field believed when no limit was given. nsqd's own
	// limits are 1 MiB for a message and 5 MiB for a body; what is above 128 MiB is not nsqd.
	defaultMaxFrame = 128 << 20

	// firstRead is how much memory a size field is good for before bytes have arrived.
	firstRead = 64 << 10

	// maxText is the largest size field of a response or an error while connected, and of all frames while connecting.
	// What nsqd has to say takes less than 1 KiB.
	maxText = 64 << 10

	// httpSize is "HTTP" read as a size field: the start of a web server's answer.
	httpSize = 0x48545450

	maxNameLength   = 64
	ephemeralSuffix = "#ephemeral"
)

// IsValidTopicName tells whether nsqd accepts name for a topic: 1 to 64 of the characters
// .a-zA-Z0-9_- in all, of which the last ten may be #ephemeral (with something before them).
func IsValidTopicName(name string) bool {
	return isValidName(name)
}

// IsValidChannelName tells whether nsqd accepts name for a channel. The rule is that of
// IsValidTopicName.
func IsValidChannelName(name string) bool {
	return isValidName(name)
}

func isValidName(name string) bool {
	if len(name) > maxNameLength {
		return false
	}
	name = strings.TrimSuffix(name, ephemeralSuffix)
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return name != ""
}

// frameLimit is the bound for size fields that stands for what the caller gave.
func frameLimit(maxMsgSize ...int32) int32 {
	if len(maxMsgSize) > 0 && maxMsgSize[0] > 0 {
		return maxMsgSize[0]
	}
	return defaultMaxFrame
}

// checkSize judges a size field before anything is allocated for it.
func checkSize(size, limit int32) error {
	switch {
	case size == httpSize: // whatever the limit: it is never a frame of 1.1 GB
		return ErrHTTPResponse
	case size < 0 || size > limit:
		return &FrameSizeError{Size: int64(size), Max: limit}
	}
	return nil
}

// ReadResponse reads one block from r: a size of four bytes, big endian, and as many bytes of
// data, which are returned without the size. On a connection to nsqd the data is a frame, to be
// taken apart by UnpackResponse.
//
// A size that is negative or above maxMsgSize is a *FrameSizeError; maxMsgSize is in bytes, and
// left out or not above 0 it means 128 MiB. The answer of an HTTP server is ErrHTTPResponse. The end of
// r is io.EOF before the first byte and io.ErrUnexpectedEOF behind it. Memory is allocated as bytes
// arrive, so an announced size costs nothing by itself.
//
// ReadResponse reads no further than the block, and blocks as long as r does.
func ReadResponse(r io.Reader, maxMsgSize ...int32) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := int32(binary.BigEndian.Uint32(head[:]))
	if err := checkSize(size, frameLimit(maxMsgSize...)); err != nil {
		return nil, err
	}

	data := make([]byte, min(int(size), firstRead))
	for read := 0; ; {
		n, err := io.ReadFull(r, data[read:])
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		read += n
		if read == int(size) {
			return data, nil
		}
		data = append(make([]byte, 0, growTo(read, int(size))), data...)
		data = data[:cap(data)]
	}
}

// growTo is the next capacity of a buffer that is full with n bytes of a block of size bytes.
func growTo(n, size int) int {
	if n > size/2 {
		return size
	}
	return 2 * n
}

// UnpackResponse splits a frame into its type and its data, which aliases frame. A frame of less
// than four bytes is a *FrameSizeError, and its type -1.
func UnpackResponse(frame []byte) (int32, []byte, error) {
	if len(frame) < frameTypeLength {
		return -1, nil, &FrameSizeError{Size: int64(len(frame))}
	}
	return int32(binary.BigEndian.Uint32(frame)), frame[frameTypeLength:], nil
}

// ReadUnpackedResponse reads one frame from r and splits it: ReadResponse and UnpackResponse in
// one, with their errors. The type is -1 with every error.
func ReadUnpackedResponse(r io.Reader, maxMsgSize ...int32) (int32, []byte, error) {
	frame, err := ReadResponse(r, maxMsgSize...)
	if err != nil {
		return -1, nil, err
	}
	return UnpackResponse(frame)
}
