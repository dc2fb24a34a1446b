package nsq

import (
	"encoding/binary"
	"io"
)

const (
	frameHeader = 8 // the size field and the type

	minReadBuffer = 4 << 10  // what an idle connection keeps
	maxReadBuffer = 64 << 10 // from here on larger reads gain nothing

	// largeFrame is the most data of a frame that goes through the buffer. What is larger is read
	// straight into memory of its own, but for its head.
	largeFrame = 16 << 10

	// shortRead is what is read into the buffer after a large frame: another one is likely to follow, and
	// what the buffer has of it must be copied. It has room for the head and a few small frames.
	shortRead = 512

	quietFills    = 8   // after so many small fills a grown buffer is given up
	maxEmptyReads = 100 // as many (0, nil) from a reader are a fault of its own
)

// frameReader cuts frames out of a byte stream, with few reads and few copies. It is used by one
// goroutine in two steps: next until it finds no more, then fill.
//
//	for {
//		frameType, data, body, ok, err := f.next()
//		...
//		if !ok {
//			err = f.fill()
//		}
//	}
type frameReader struct {
	r   io.Reader
	max int32 // limit for a frame's size field

	// maxText is the limit for frames that are no messages, if it isn't 0.
	maxText int32

	start int // unread bytes are buf[start:end]
	end   int
	buf   []byte

	large   []byte // what has come of the large frame being read, behind its head; nil when there is none
	size    int    // that it will have, as announced
	typ     int32  // of that frame
	head    [messageHeaderSize]byte
	largest int  // the most that came whole: what the peer has shown to be true
	follows bool // the last frame was large

	quiet int   // fills of an empty buffer in a row that brought little
	err   error // came together with bytes; for the next fill
}

// newFrameReader reads from r. A frame's size field, which counts the data and 4 bytes of type, may be
// maxFrame at most; 0 and below is the default of 128 MiB.
func newFrameReader(r io.Reader, maxFrame int32) *frameReader {
	return &frameReader{r: r, max: frameLimit(maxFrame), buf: make([]byte, minReadBuffer)}
}

// next returns the next frame that has come whole. ok is false when there is none: call fill. The data of a large frame
// comes in two parts: data has as much as stands before the body of a message, and body the rest, for the caller to keep. Of
// other frames body is nil. data is valid until the next fill, that of a large frame until the next call of next. An error
// is final: *FrameSizeError or ErrHTTPResponse.
func (f *frameReader) next() (frameType int32, data, body []byte, ok bool, err error) {
	b := f.buf[f.start:f.end]
	if len(b) < frameHeader {
		return f.nextSlow(b)
	}
	size := int32(binary.BigEndian.Uint32(b))
	n := int(size) - frameTypeLength
	if uint(n) > largeFrame || size > f.max { // negative n are large as well
		return f.nextSlow(b)
	}
	if len(b)-frameHeader < n {
		return 0, nil, nil, false, nil
	}
	f.start += frameHeader + n
	f.follows = false
	return int32(binary.BigEndian.Uint32(b[4:])), b[frameHeader : frameHeader+n : frameHeader+n], nil, true, nil
}

// nextSlow is next for what is rare: an incomplete header, a wrong size, a large frame.
func (f *frameReader) nextSlow(b []byte) (frameType int32, data, body []byte, ok bool, err error) {
	if f.large == nil {
		if len(b) < 4 {
			return 0, nil, nil, false, nil
		}
		// The size is judged before the type is there, or a web server that waits for more would
		// never be recognised.
		size := int32(binary.BigEndian.Uint32(b))
		if err := checkSize(size, f.max); err != nil {
			return 0, nil, nil, false, err
		}
		if size < frameTypeLength {
			return 0, nil, nil, false, &FrameSizeError{Size: int64(size)}
		}
		if len(b) < frameHeader {
			return 0, nil, nil, false, nil
		}
		typ := int32(binary.BigEndian.Uint32(b[4:]))
		if f.maxText > 0 && size > f.maxText && typ != FrameTypeMessage {
			return 0, nil, nil, false, &FrameSizeError{Size: int64(size), Max: f.maxText, text: true}
		}
		if len(b) < frameHeader+len(f.head) {
			return 0, nil, nil, false, nil
		}
		f.beginLarge(typ, int(size)-frameTypeLength-len(f.head), b[frameHeader:])
	}
	if len(f.large) < f.size {
		return 0, nil, nil, false, nil
	}
	body = f.large
	f.large = nil
	f.largest = max(f.largest, len(body))
	f.follows = true
	return f.typ, f.head[:], body, true, nil
}

// beginLarge makes room for a frame with size bytes behind its head and takes what has come of it.
func (f *frameReader) beginLarge(typ int32, size int, have []byte) {
	have = have[copy(f.head[:], have):]
	have = have[:min(len(have), size)]
	f.typ, f.size = typ, size
	// have is never more than the room: the buffer isn't larger than firstRead.
	f.large = append(make([]byte, 0, min(size, max(firstRead, doubled(f.largest)))), have...)
	f.start += frameHeader + len(f.head) + len(have)
}

// doubled is 2n, or the largest possible size where that doesn't fit an int.
func doubled(n int) int {
	const limit = int(^uint(0) >> 1)
	if n > limit/2 {
		return limit
	}
	return 2 * n
}

// fill waits for one read from the stream, so that next may find more. The data that next returned is
// void after it. The end of the stream is io.EOF between frames and io.ErrUnexpectedEOF
// within one. After an error of the stream that passes, such as a deadline, fill may be called again: nothing is lost.
func (f *frameReader) fill() error {
	if err := f.err; err != nil {
		f.err = nil
		return f.endOfStream(err)
	}
	if f.large != nil {
		if len(f.large) == cap(f.large) {
			f.large = append(make([]byte, 0, growTo(len(f.large), f.size)), f.large...)
		}
		n, err := f.read(f.large[len(f.large):cap(f.large)])
		f.large = f.large[:len(f.large)+n]
		return err
	}
	f.makeRoom()
	room := f.buf[f.end:]
	if f.follows && f.end == 0 {
		room = room[:shortRead]
	}
	n, err := f.read(room)
	f.end += n
	return err
}

// makeRoom moves what is unread to the start of the buffer, whose size follows what reads bring.
func (f *frameReader) makeRoom() {
	unread := f.buf[f.start:f.end]
	size := len(f.buf)
	switch {
	case f.end == size && size < maxReadBuffer: // the last read might have brought more
		size = min(2*size, maxReadBuffer)
		f.quiet = 0
	case f.start == 0 && f.end > 0: // part of a frame, and room behind it
		return
	case f.end >= minReadBuffer:
		f.quiet = 0
	case len(unread) == 0:
		if f.quiet++; f.quiet >= quietFills {
			f.quiet = 0
			size = minReadBuffer
		}
	}
	if size != len(f.buf) {
		buf := make([]byte, size)
		copy(buf, unread)
		f.buf = buf
	} else {
		copy(f.buf, unread)
	}
	f.start, f.end = 0, len(unread)
}

// read reads once into p, which has room, and returns an error only if nothing came.
func (f *frameReader) read(p []byte) (int, error) {
	for range maxEmptyReads {
		n, err := f.r.Read(p)
		if n > 0 {
			f.err = err
			return n, nil
		}
		if err != nil {
			return 0, f.endOfStream(err)
		}
	}
	return 0, io.ErrNoProgress
}

// endOfStream tells an end within a frame from one between frames.
func (f *frameReader) endOfStream(err error) error {
	if err == io.EOF && (f.large != nil || f.start < f.end) {
		return io.ErrUnexpectedEOF
	}
	return err
}
