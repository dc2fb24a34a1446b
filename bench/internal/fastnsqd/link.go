package fastnsqd

import (
	"bufio"
	"compress/flate"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/golang/snappy"
	"github.com/rdyloop/nsq"
)

// deflateLevel is the quickest: how fast a client decompresses hardly depends on it.
const deflateLevel = flate.BestSpeed

// maxIdentify is nsqd's limit for the body of a command.
const maxIdentify = 5 << 20

// link is the byte stream to the consumer, in its layers.
type link struct {
	nc net.Conn // TLS if that was asked for
	r  *bufio.Reader
	w  io.Writer
	// flush sends what w keeps; nil if that is nothing.
	flush func() error
}

func newLink(nc net.Conn) link { return link{nc: nc, r: newReader(nc), w: nc} }

// newReader is small, so that reads into something larger go past it.
func newReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 4<<10) }

// write writes data and sends it.
func (l *link) write(data []byte) error {
	if _, err := l.w.Write(data); err != nil {
		return err
	}
	if l.flush == nil {
		return nil
	}
	return l.flush()
}

func (l *link) respond(text string) error {
	return l.write(appendFrame(nil, nsq.FrameTypeResponse, []byte(text)))
}

// readBody reads a length and as many bytes.
func (l *link) readBody() ([]byte, error) {
	var length uint32
	if err := binary.Read(l.r, binary.BigEndian, &length); err != nil {
		return nil, err
	}
	if length > maxIdentify {
		return nil, fmt.Errorf("a body of %d bytes", length)
	}
	data := make([]byte, length)
	_, err := io.ReadFull(l.r, data)
	return data, err
}

var errEarly = errors.New("bytes came before the upgrade was granted")

// Each upgrade begins after the answer to IDENTIFY, and ends with an OK through the new layer.

func (l *link) startTLS(config *tls.Config) error {
	if l.r.Buffered() > 0 {
		return errEarly
	}
	nc := tls.Server(l.nc, config)
	if err := nc.Handshake(); err != nil {
		return err
	}
	*l = newLink(nc)
	return l.respond("OK")
}

func (l *link) startSnappy() error {
	if l.r.Buffered() > 0 {
		return errEarly
	}
	w := snappy.NewBufferedWriter(l.nc)
	l.r, l.w, l.flush = newReader(snappy.NewReader(l.nc)), w, w.Flush
	return l.respond("OK")
}

func (l *link) startDeflate() error {
	if l.r.Buffered() > 0 {
		return errEarly
	}
	pieces := bufio.NewWriterSize(l.nc, 64<<10) // flate writes a few hundred bytes at a time
	w, err := flate.NewWriter(pieces, deflateLevel)
	if err != nil {
		return err
	}
	l.r = newReader(flate.NewReader(bufio.NewReaderSize(l.nc, 64<<10)))
	l.w = w
	l.flush = func() error { return errors.Join(w.Flush(), pieces.Flush()) }
	return l.respond("OK")
}

func appendFrame(b []byte, frameType int32, data []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(4+len(data)))
	b = binary.BigEndian.AppendUint32(b, uint32(frameType))
	return append(b, data...)
}
