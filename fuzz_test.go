package nsq

import (
	"bytes"
	"compress/flate"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/stretchr/testify/require"
)

// This file holds the fuzz targets for what takes more than one decoder: a connection that reads, the handshake, a query
// of an nsqlookupd. Those of single decoders stand beside their tests.

// ---- a peer whose words are known beforehand

// saidConn is a connection whose peer has said all that it will say.
type saidConn struct {
	r       io.Reader
	written bytes.Buffer
	closed  bool
}

func (c *saidConn) Read(p []byte) (int, error) {
	if c.closed {
		return 0, net.ErrClosed
	}
	return c.r.Read(p)
}

func (c *saidConn) Write(p []byte) (int, error) {
	if c.closed {
		return 0, net.ErrClosed
	}
	return c.written.Write(p)
}

func (c *saidConn) Close() error                     { c.closed = true; return nil }
func (c *saidConn) LocalAddr() net.Addr              { return fakeAddr("client:1") }
func (c *saidConn) RemoteAddr() net.Addr             { return fakeAddr("nsqd:4150") }
func (c *saidConn) SetDeadline(time.Time) error      { return nil }
func (c *saidConn) SetReadDeadline(time.Time) error  { return nil }
func (c *saidConn) SetWriteDeadline(time.Time) error { return nil }

// heardOwner writes down what a connection tells its owner.
type heardOwner struct {
	heard []string
	kept  []*Message
}

func (o *heardOwner) add(format string, args ...any) {
	o.heard = append(o.heard, fmt.Sprintf(format, args...))
}

func (o *heardOwner) received(_ *Conn, ms *arrivals) {
	for i := range ms.messages {
		o.add("message %d", len(o.kept))
		o.kept = append(o.kept, &ms.messages[i])
	}
}
func (o *heardOwner) concerns(answer) bool                              { return false }
func (o *heardOwner) decide(*Conn, *Message, answer) bool               { return false }
func (o *heardOwner) ranInVain([]MessageID)                             {}
func (o *heardOwner) lateAnswer(*Conn, *Message, bool)                  {}
func (o *heardOwner) response(_ *Conn, data []byte)                     { o.add("response %q", data) }
func (o *heardOwner) protocolError(_ *Conn, e *ProtocolError, _ []byte) { o.add("error %q", e.Error()) }
func (o *heardOwner) heartbeat(*Conn)                                   { o.add("heartbeat") }
func (o *heardOwner) changed()                                          {}
func (o *heardOwner) failed(_ *Conn, err error, _ bool)                 { o.add("failed %v", err) }

// requirePresentable checks that an error can be put into a log: one line, not endless, without the secret.
func requirePresentable(t *testing.T, text, secret string) {
	t.Helper()
	require.Equal(t, text, printable(text))
	require.Less(t, len(text), 10*maxErrorText+1000)
	if secret != "" {
		require.NotContains(t, text, secret)
	}
}

// FuzzReadLoop: whatever an nsqd sends, a connection hears what the plain decoders say, in that order, and keeps what it
// has been given; then it ends in their error.
func FuzzReadLoop(f *testing.F) {
	message := func(id byte, body string) []byte {
		return append(append([]byte("\x01\x02\x03\x04\x05\x06\x07\x08\x00\x05"), bytes.Repeat([]byte{id}, MsgIDLength)...), body...)
	}
	late := []byte("E_FIN_FAILED FIN aaaaaaaaaaaaaaaa failed ID not in flight")
	stream := appendFrame(nil, FrameTypeMessage, message('a', "one"))
	stream = appendFrame(stream, FrameTypeResponse, []byte(heartbeat))
	stream = appendFrame(stream, FrameTypeMessage, message('b', ""))
	stream = appendFrame(stream, FrameTypeMessage, message('a', "again"))
	stream = appendFrame(stream, FrameTypeError, late)
	f.Add(stream, []byte{9}, uint32(0))
	f.Add(appendFrame(stream, FrameTypeResponse, []byte(closeWait)), []byte{1, 0, 200}, uint32(70_000))
	f.Add(appendFrame(stream, FrameTypeError, []byte("E_INVALID x\ny")), []byte{}, uint32(16<<10))
	f.Add(appendFrame(stream, FrameTypeError, []byte("E_TOUCH_FAILED TOUCH aaaaaaaaaaaaaaaa failed")), []byte{}, uint32(0))
	f.Add(appendFrame(stream, FrameTypeMessage, message('c', "")[:25]), []byte{3}, uint32(1))
	f.Add(appendFrame(stream, 3, nil), []byte{250}, uint32(20_000))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n"), []byte{4}, uint32(0))
	f.Fuzz(func(t *testing.T, tail, splits []byte, large uint32) {
		var stream []byte
		if large > 0 { // the fuzzer would not find large messages by itself
			stream = appendFrame(stream, FrameTypeMessage, message('l', strings.Repeat("l", int(large%200_000))))
		}
		stream = append(stream, tail...)

		want := &heardOwner{}
		var wantErr error
		late := 0
		for r := bytes.NewReader(stream); wantErr == nil; {
			frameType, data, err := ReadUnpackedResponse(r)
			switch {
			case err != nil:
				wantErr = err
			case frameType == FrameTypeMessage:
				m, err := DecodeMessage(data)
				if wantErr = err; err == nil {
					want.add("message %d", len(want.kept))
					want.kept = append(want.kept, m)
				}
			case frameType == FrameTypeResponse && string(data) == heartbeat:
				want.heartbeat(nil)
			case frameType == FrameTypeResponse:
				want.response(nil, data)
			case frameType == FrameTypeError:
				perr := parseProtocolError(data)
				want.protocolError(nil, perr, data)
				if perr.Fatal() {
					wantErr = perr
				} else {
					late++
				}
			default:
				wantErr = &UnexpectedFrameError{frameType}
			}
		}

		got := &heardOwner{}
		nc := &saidConn{r: &splitReader{r: bytes.NewReader(stream), sizes: splits}}
		c := newConn("nsqd:4150", NewConfig(), got, &loggers{})
		c.transport = newTransport(nc, 0)
		c.allow(1 << 30) // the bound has its own test
		err := c.readLoop()
		require.True(t, nc.closed)

		var size *FrameSizeError
		if wantErr == io.ErrUnexpectedEOF && errors.As(err, &size) {
			wantErr = size // a size is judged before its data have come
		}
		require.Equal(t, wantErr, err)
		// Messages right before bytes that make no sense came with a connection that is lost: nobody need hear of them.
		for n := len(want.heard); n > len(got.heard)-1 && strings.HasPrefix(want.heard[n-1], "message"); n-- {
			want.heard = want.heard[:n-1]
		}
		want.failed(nil, wantErr, false)
		require.Equal(t, want.heard, got.heard)
		require.Equal(t, late, int(c.counts.late))
		require.Len(t, got.kept, int(c.counts.received))
		for i, m := range got.kept {
			w := want.kept[i]
			require.Equal(t, w.ID, m.ID)
			require.Equal(t, w.Attempts, m.Attempts)
			require.Equal(t, w.Timestamp, m.Timestamp)
			if m.Body != nil { // else it was dropped with the connection, or by its next delivery
				require.Equal(t, string(w.Body), string(m.Body))
			}
		}
		require.Zero(t, c.table.live)
		require.Empty(t, c.out)
	})
}

// FuzzHandshake: any answer to IDENTIFY, and anything behind it, makes a connection that works with the values that were
// granted, or an error that can be shown. The secret goes out only to who asks for it, and not in clear text if TLS was
// asked for.
func FuzzHandshake(f *testing.F) {
	const secret = "hush-4711"
	ok := appendFrame(nil, FrameTypeResponse, []byte("OK"))
	f.Add([]byte("OK"), []byte{}, byte(0))
	f.Add([]byte(`{"max_rdy_count":2500,"version":"1.3.0","msg_timeout":60000,"max_msg_timeout":900000}`), []byte{}, byte(7))
	f.Add([]byte(`{"tls_v1":true}`), append(ok, ok...), byte(1))
	f.Add([]byte(`{"snappy":true}`), []byte("\xff\x06\x00\x00sNaPpY"), byte(2))
	f.Add([]byte(`{"deflate":true}`), []byte("\x00\x00\x00\xff\xff"), byte(4))
	f.Add([]byte(`{"auth_required":true}`), appendFrame(nil, FrameTypeResponse, []byte(`{"identity":"x\ny","permission_count":1}`)), byte(0))
	f.Add([]byte(`{"auth_required":true,"tls_v1":true}`), appendFrame(nil, FrameTypeError, []byte("E_AUTH_FAILED")), byte(1))
	f.Add([]byte(heartbeat), ok, byte(0))
	f.Add([]byte(`{"max_rdy_count":-1,"msg_timeout":9223372036854775807,"max_msg_timeout":18446744073709552}`), []byte{}, byte(0))
	f.Add([]byte(`{"msg_timeout":"`+strings.Repeat("1", 5000)+`"}`), []byte{}, byte(0))
	f.Add([]byte(`{"msg_timeout":`+strings.Repeat("1", 10000)+`}`), []byte{}, byte(0))
	f.Add([]byte(`{"version":"a\nb\u202e`+strings.Repeat("c", 6000)+`"}`), []byte{}, byte(0))
	f.Fuzz(func(t *testing.T, identify, tail []byte, options byte) {
		cfg := NewConfig()
		cfg.AuthSecret = secret
		cfg.TlsV1, cfg.Snappy, cfg.Deflate = options&1 != 0, options&2 != 0, options&4 != 0
		nc := &saidConn{r: bytes.NewReader(append(appendFrame(nil, FrameTypeResponse, identify), tail...))}
		cfg.Dial = func(context.Context, string, string) (net.Conn, error) { return nc, nil }
		c := NewConn("nsqd:4150", cfg, nil)
		c.SetLogger(funcLogger(func(_ int, line string) error {
			requirePresentable(t, line, secret)
			return nil
		}), LogLevelDebug, "")
		resp, err := c.handshake(t.Context())

		written := nc.written.String()
		require.True(t, strings.HasPrefix(written, "  V2IDENTIFY\n"))
		var said IdentifyResponse
		known := string(identify) != heartbeat // else the answer stands in tail
		if known {
			_ = json.Unmarshal(identify, &said)
		}
		if strings.Contains(written, secret) { // TLS and compression would make it unreadable
			require.False(t, cfg.TlsV1, "in clear text")
			require.True(t, said.AuthRequired || !known)
		}
		if err != nil {
			require.Nil(t, resp)
			require.True(t, nc.closed)
			requirePresentable(t, err.Error(), secret)
			return
		}
		require.False(t, nc.closed)
		if known && string(identify) == "OK" {
			require.Nil(t, resp)
			require.False(t, cfg.TlsV1)
		} else if known {
			require.Equal(t, said, *resp)
		}
		require.Positive(t, c.MaxRDY())
		if said.MaxRdyCount > 0 {
			require.Equal(t, said.MaxRdyCount, c.MaxRDY())
		}
		now := monotonic()
		_, err = c.enter(&arrivals{messages: make([]Message, 1)}, now)
		require.NoError(t, err)
		d := c.table.oldest()
		for _, v := range []struct{ granted, got int64 }{{said.MsgTimeout, d.deadline}, {said.MaxMsgTimeout, d.limit}} {
			switch {
			case !known:
			case v.granted <= 0:
				require.Zero(t, v.got)
			case v.granted < 1e9:
				require.Equal(t, now+v.granted*1e6, v.got)
			default:
				require.Greater(t, v.got, now+1e9, "a message with a long time never has a short one")
			}
		}
	})
}

// FuzzAuthAnswer: only a response frame with a JSON object's fields is taken as permission.
func FuzzAuthAnswer(f *testing.F) {
	const secret = "hush-4711"
	f.Add(FrameTypeResponse, []byte(`{"identity":"me","identity_url":"http://x","permission_count":2}`))
	f.Add(FrameTypeResponse, []byte(`{"identity":"a\nb\u202e`+strings.Repeat("c", 8000)+`"}`))
	f.Add(FrameTypeResponse, []byte("OK"))
	f.Add(FrameTypeResponse, []byte("null"))
	f.Add(FrameTypeResponse, []byte("{}{}"))
	f.Add(FrameTypeResponse, []byte(heartbeat))
	f.Add(FrameTypeResponse, []byte(`{"permission_count":`+strings.Repeat("9", 9000)+`}`))
	f.Add(FrameTypeResponse, []byte(`{"permission_count":"`+secret+`"}`))
	f.Add(FrameTypeError, []byte("E_AUTH_FAILED no\nway "+secret))
	f.Add(FrameTypeMessage, []byte(`{}`))
	f.Fuzz(func(t *testing.T, frameType int32, data []byte) {
		cfg := NewConfig()
		cfg.AuthSecret = secret
		nc := &saidConn{r: bytes.NewReader(appendFrame(nil, frameType, data))}
		c := NewConn("nsqd:4150", cfg, nil)
		c.SetLogger(funcLogger(func(_ int, line string) error {
			requirePresentable(t, line, secret)
			return nil
		}), LogLevelDebug, "")
		c.transport = newTransport(nc, 0)
		err := c.authenticate()

		want := "AUTH\n" + sized(int32(len(secret)), secret)
		beat := frameType == FrameTypeResponse && string(data) == heartbeat
		if beat {
			want += "NOP\n"
		}
		require.Equal(t, want, nc.written.String())
		good := frameType == FrameTypeResponse && !beat && json.Unmarshal(data, new(AuthResponse)) == nil
		require.Equal(t, good, err == nil, "%v", err)
		if err != nil {
			requirePresentable(t, err.Error(), secret)
		}
		var refused *ProtocolError
		if frameType == FrameTypeError {
			require.ErrorAs(t, err, &refused)
		}
	})
}

// FuzzLayers: through compression, what was written comes out at every segmentation; senseless bytes end in an error or
// at the stream's end; and neither needs more memory than the largest frame that came.
func FuzzLayers(f *testing.F) {
	f.Add([]byte("some bytes"), []byte{1, 5, 0}, byte(0))
	f.Add([]byte("some bytes"), []byte{200}, byte(1))
	f.Add([]byte("\xff\x06\x00\x00sNaPpY\x01\x08\x00\x00abcdefgh"), []byte{3}, byte(0))
	f.Add([]byte("\xff\x06\x00\x00sNaPpY\x00\xff\xff\xff\x00\x00\x00\x00\xff\xff\xff\xff\x0f"), []byte{}, byte(0))
	f.Add([]byte("\x00\x00\x00\xff\xff"), []byte{2}, byte(1))
	for kind, bomb := range []string{snappyBomb(1 << 20), deflateBomb(1 << 20)} {
		f.Add([]byte(bomb), []byte{}, byte(kind))
	}
	f.Fuzz(func(t *testing.T, data, splits []byte, kind byte) {
		layered := func(nc *saidConn) *transport {
			tr := newTransport(nc, 0)
			if kind%2 == 0 {
				tr.addSnappy()
			} else {
				require.NoError(t, tr.addDeflate(1+int(kind)%9))
			}
			return tr
		}
		to := &saidConn{}
		w := layered(to)
		for piece := range slices.Chunk(data, max(1, len(data)/3)) {
			require.NoError(t, w.write(piece))
		}
		r := layered(&saidConn{r: &splitReader{r: &to.written, sizes: splits}})
		got := make([]byte, len(data))
		_, err := io.ReadFull(r.r, got)
		require.NoError(t, err)
		require.Equal(t, data, got)

		// The same bytes as if they were compressed frames.
		frames := newFrameReader(layered(&saidConn{r: &splitReader{r: bytes.NewReader(data), sizes: splits}}).r, 1<<20)
		for read := 0; read < 4<<20; { // a bomb may go on
			_, data, body, ok, err := frames.next()
			if err == nil && !ok {
				err = frames.fill()
			}
			if err != nil {
				break
			}
			if ok {
				read += frameHeader + len(data) + len(body)
			}
			requireFrameMemory(t, frames, read)
		}
	})
}

// snappyBomb is n zeros and more, compressed.
func snappyBomb(n int) string {
	var b bytes.Buffer
	w := snappy.NewBufferedWriter(&b)
	_, _ = w.Write(make([]byte, n))
	_ = w.Close()
	return b.String()
}

func deflateBomb(n int) string {
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, 9)
	_, _ = w.Write(make([]byte, n))
	_ = w.Flush()
	return b.String()
}

// requireFrameMemory checks the memory of a frameReader against what has come out of it and what it holds.
func requireFrameMemory(t *testing.T, f *frameReader, read int) {
	t.Helper()
	if len(f.buf) > maxReadBuffer || cap(f.large) > max(firstRead, 2*len(f.large), 2*f.largest) || f.largest > read {
		t.Fatalf("after %d bytes: a buffer of %d, %d for a large frame of which %d have come, the largest had %d",
			read, len(f.buf), cap(f.large), len(f.large), f.largest)
	}
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// FuzzQueryLookupd: what a web server says is a good answer with addresses that can be dialled, the good answer that the
// topic is unknown, or an error that can be shown, without the secret it was sent.
func FuzzQueryLookupd(f *testing.F) {
	const secret = "hush-4711"
	f.Add(200, []byte(`{"producers":[`+producerJSON("h", 1)+`]}`), "topic")
	f.Add(404, []byte(`{"message":"TOPIC_NOT_FOUND"}`), "t#ephemeral")
	f.Add(500, []byte("<html>\nBearer "+secret+"</html>"), "t")
	f.Add(403, []byte(`{"message":"Bearer `+secret+`\n"}`), "t")
	f.Add(200, []byte(`{"status_code":500,"status_txt":"`+strings.Repeat("ä", 500)+secret+`","data":null}`), "t")
	f.Add(200, []byte(`{"producers":"`+secret+`"}`), "t")
	f.Add(200, []byte(`{"producers":[{"broadcast_address":"a `+secret+`","tcp_port":4150},{"broadcast_address":"`+secret+`","tcp_port":"x"}]}`), "t")
	f.Add(-1, []byte(""), "")
	f.Fuzz(func(t *testing.T, status int, body []byte, topic string) {
		u := &url.URL{Scheme: "http", Host: "lookupd:4161", Path: "/lookup", RawQuery: "a=b", User: url.UserPassword("u", "pass-0815")}
		client := &http.Client{Transport: roundTrip(func(req *http.Request) (*http.Response, error) {
			require.Equal(t, url.Values{"a": {"b"}, "topic": {topic}}, req.URL.Query())
			require.Equal(t, "Bearer "+secret, req.Header.Get("Authorization"))
			if 300 <= status && status < 400 { // a redirect is the client's matter
				status = 400
			}
			return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewReader(body)), Request: req}, nil
		})}
		answer, err := queryLookupd(t.Context(), client, u, topic, secret)
		for _, addr := range answer.addrs {
			network, _, err := parseNSQDAddress(addr)
			require.NoError(t, err)
			require.Equal(t, "tcp", network)
		}
		requirePresentable(t, answer.reason, secret)
		if err == nil {
			require.Equal(t, http.StatusOK, status)
			return
		}
		require.Zero(t, answer)
		if err == errTopicNotFound {
			require.Contains(t, string(body), "TOPIC_NOT_FOUND")
			return
		}
		var lerr *LookupdError
		require.ErrorAs(t, err, &lerr)
		requirePresentable(t, err.Error(), secret)
		require.NotContains(t, err.Error(), "pass-0815")
	})
}

// ---- messages

// FuzzDecodeMessage: what is decoded is the input, byte for byte.
func FuzzDecodeMessage(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, messageHeaderSize-1))
	f.Add(make([]byte, messageHeaderSize))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff0123456789abcdefbody"))
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := DecodeMessage(in)
		if len(in) < messageHeaderSize {
			require.Equal(t, ErrShortMessage, err)
			require.Nil(t, m)
			return
		}
		require.NoError(t, err)
		var out bytes.Buffer
		n, err := m.WriteTo(&out)
		require.NoError(t, err)
		require.EqualValues(t, len(in), n)
		require.Equal(t, in, out.Bytes())
		require.Len(t, m.Body, len(in)-messageHeaderSize)
		require.NotNil(t, m.Body)
		require.False(t, m.HasResponded())
	})
}

// FuzzMessageBatch: by the batch, messages come out as they do one by one. None lies in another's memory or in the
// buffer they were read from, and a batch stays small.
func FuzzMessageBatch(f *testing.F) {
	f.Add(make([]byte, 300), []byte{26, 30, 100, 26}, uint16(0))
	f.Add(make([]byte, 300), []byte{26, 25, 100}, uint16(0))
	f.Add(make([]byte, 30), []byte{26, 1}, uint16(20_000))
	f.Add(make([]byte, 30), bytes.Repeat([]byte{26}, 200), uint16(1))
	f.Add(make([]byte, 30), bytes.Repeat([]byte{255}, 200), uint16(40_000))
	f.Fuzz(func(t *testing.T, data, sizes []byte, large uint16) {
		// Frames of the sizes, cut out of data again and again; one of them is large and owned.
		var frames [][]byte
		off := 0
		next := func(n int) []byte {
			frame := make([]byte, n)
			for i := range frame {
				if len(data) > 0 {
					frame[i] = data[off%len(data)]
					off++
				}
			}
			return frame
		}
		for i, n := range sizes {
			if large > 0 && i == len(sizes)/2 {
				frames = append(frames, next(int(large)))
			}
			frames = append(frames, next(int(n)))
		}
		var b messageBatch
		var got []*Message
		var want []*Message
		take := func() {
			small := 0
			for i, frame := range b.frames {
				if i < len(b.frames)-1 || b.large == nil {
					small += len(frame)
				}
			}
			ms := b.take().messages
			require.LessOrEqual(t, len(ms), maxBatch)
			require.True(t, small <= maxBatchBodies || len(ms) == 1)
			require.True(t, b.empty())
			for i := range ms {
				got = append(got, &ms[i])
			}
		}
		for _, frame := range frames {
			read := append(make([]byte, 0, len(frame)), frame...) // what the reader will reuse
			var body []byte
			if len(frame) > largeFrame {
				read, body = read[:messageHeaderSize:messageHeaderSize], read[messageHeaderSize:]
			}
			if b.full(read, body) {
				take()
			}
			err := b.add(read, body)
			m, wantErr := DecodeMessage(slices.Clone(frame))
			require.Equal(t, wantErr, err)
			if err == nil {
				want = append(want, m)
			}
			if len(b.frames) > 0 && (off%3 == 0 || body == nil && len(b.frames)%2 == 0) {
				reused := slices.Clone(b.frames)
				take()
				for _, read := range reused {
					clear(read)
				}
			}
		}
		if !b.empty() {
			take()
		}
		require.Len(t, got, len(want))
		for _, m := range got {
			require.Equal(t, len(m.Body), cap(m.Body), "or an append would reach into the next body")
		}
		for i, m := range got {
			require.Equal(t, want[i].ID, m.ID)
			require.Equal(t, want[i].Attempts, m.Attempts)
			require.Equal(t, want[i].Timestamp, m.Timestamp)
			require.Equal(t, string(want[i].Body), string(m.Body), i)
		}
	})
}

// ---- texts

var nsqdName = regexp.MustCompile(`\A[.a-zA-Z0-9_-]+(#ephemeral)?\z`)

// FuzzNames: a name is valid if nsqd's rule says so, and then it is one word on the wire.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"", "a", "a#ephemeral", "#ephemeral", "a b", "a\nb", strings.Repeat("a", 64), strings.Repeat("a", 65), "ä", "a#ephemeral#ephemeral", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		valid := len(name) <= 64 && nsqdName.MatchString(name)
		require.Equal(t, valid, IsValidTopicName(name))
		require.Equal(t, valid, IsValidChannelName(name))
		_, topicErr := NewConsumer(name, "c", NewConfig())
		_, channelErr := NewConsumer("t", name, NewConfig())
		require.Equal(t, valid, topicErr == nil)
		require.Equal(t, valid, channelErr == nil)
		if !valid {
			requirePresentable(t, topicErr.Error(), "")
			requirePresentable(t, channelErr.Error(), "")
			return
		}
		line := string(appendCommand(nil, Subscribe(name, name)))
		require.Equal(t, []string{"SUB", name, name}, strings.Fields(line))
		require.Equal(t, len(line)-1, strings.IndexByte(line, '\n'))
		require.Equal(t, name, printable(name))
	})
}

// FuzzTLSFiles: whatever is in a file, an option that names it is refused and the Config as before, or taken and in use.
func FuzzTLSFiles(f *testing.F) {
	cert := fakeCert()
	f.Add(cert.certPEM, cert.keyPEM)
	f.Add(cert.keyPEM, cert.certPEM)
	f.Add([]byte{}, []byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Add(append(slices.Clone(cert.certPEM), "garbage"...), []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, certData, keyData []byte) {
		dir := t.TempDir()
		certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
		require.NoError(t, os.WriteFile(certFile, certData, 0o600))
		require.NoError(t, os.WriteFile(keyFile, keyData, 0o600))
		try := func(c *Config, name, file string) bool {
			before := *c
			err := c.Set(name, file)
			if err == nil {
				return true
			}
			var refused *OptionError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, name, refused.Option)
			require.True(t, reflect.DeepEqual(before, *c), "refused, but changed")
			return false
		}
		c := NewConfig()
		if try(c, "tls_root_ca_file", certFile) {
			require.False(t, c.TlsConfig.RootCAs.Equal(x509.NewCertPool()), "an empty pool")
			require.Empty(t, c.TlsConfig.Certificates)
		} else {
			require.Nil(t, c.TlsConfig)
		}
		pairs := map[bool]int{}
		for _, certFirst := range []bool{true, false} {
			c := NewConfig()
			names := []string{"tls_cert", certFile, "tls_key", keyFile}
			if !certFirst {
				names = []string{"tls_key", keyFile, "tls_cert", certFile}
			}
			require.True(t, try(c, names[0], names[1]), "half a pair is not read yet")
			require.Error(t, c.Validate())
			if try(c, names[2], names[3]) {
				require.NoError(t, c.Validate())
				require.NotEmpty(t, c.TlsConfig.Certificates[0].Certificate)
				require.NotNil(t, c.TlsConfig.Certificates[0].PrivateKey)
				pairs[certFirst] = len(c.TlsConfig.Certificates)
			} else {
				require.Error(t, c.Validate())
			}
		}
		require.Equal(t, pairs[true], pairs[false], "in any order")
	})
}

// FuzzConfigFlag: a flag says what Set says.
func FuzzConfigFlag(f *testing.F) {
	for _, s := range []string{"", ",", "max_in_flight,5", "max-in-flight,5,6", "tls_v1", "max_in_flight", "auth_secret,a,b", "unknown,x", "tls_min_version,tls1.3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		name, value, found := strings.Cut(text, ",")
		switch strings.ReplaceAll(name, "-", "_") {
		case "local_addr", "tls_root_ca_file", "tls_cert", "tls_key":
			return // it would look up a name or read a file
		}
		flagged, set := NewConfig(), NewConfig()
		flagErr := (&ConfigFlag{flagged}).Set(text)
		var setErr error
		if found {
			setErr = set.Set(name, value)
		} else {
			setErr = set.Set(name, true)
		}
		require.Equal(t, fmt.Sprint(setErr), fmt.Sprint(flagErr))
		flagged.BackoffStrategy, set.BackoffStrategy = nil, nil // bound to their Config each
		require.True(t, reflect.DeepEqual(flagged, set))
	})
}
