package nsq

import (
	"bytes"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

type testFrame struct {
	typ  int32
	data string
}

// readFrames reads r to its end by way of a frameReader.
func readFrames(r io.Reader, limit int32) ([]testFrame, error) {
	f := newFrameReader(r, limit)
	var frames []testFrame
	var kept [][]byte // bodies that are ours, looked at again when all is over
	var keptAt []int
	for {
		typ, data, body, ok, err := f.next()
		switch {
		case err != nil:
		case !ok:
			err = f.fill()
		default:
			if body != nil {
				kept, keptAt = append(kept, body), append(keptAt, len(frames))
			}
			frames = append(frames, testFrame{typ, string(data)})
			_ = append(data, 0xaa) // must not reach the next frame
		}
		if err != nil {
			for i, body := range kept {
				frames[keptAt[i]].data += string(body)
			}
			return frames, err
		}
	}
}

// readFramesSimply is what readFrames has to agree with.
func readFramesSimply(r io.Reader, limit int32) ([]testFrame, error) {
	var frames []testFrame
	for {
		typ, data, err := ReadUnpackedResponse(r, limit)
		if err != nil {
			return frames, err
		}
		frames = append(frames, testFrame{typ, string(data)})
	}
}

// splitReader gives what it reads in pieces whose sizes come from sizes, again and again. A size of 0 is
// a read that brings nothing.
type splitReader struct {
	r     io.Reader
	sizes []byte
	i     int
}

func (s *splitReader) Read(p []byte) (int, error) {
	n := len(p)
	if len(s.sizes) > 0 {
		n = int(s.sizes[s.i%len(s.sizes)])
		s.i++
		if n > 200 { // so that a byte reaches large pieces as well
			n = (n - 200) * 2000
		}
	}
	if n == 0 && s.i%2 == 0 {
		n = 1
	}
	return s.r.Read(p[:min(n, len(p))])
}

func TestFrameReaderAnySegmentation(t *testing.T) {
	skipUnderRace(t, "a decoder of one goroutine")
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 2))
	sizes := []int{0, 1, 2, 30, 134, 4087, 4088, 4089, 16383, largeFrame, largeFrame + 1, 65527, 65528, 65529, 65536, 65537, 200000, 1 << 20}
	for round := range 60 {
		var stream []byte
		for range rnd.IntN(12) {
			data := bytes.Repeat([]byte{byte(rnd.Int())}, sizes[rnd.IntN(len(sizes))])
			stream = appendFrame(stream, int32(rnd.IntN(4)), data)
		}
		if round%3 == 0 && len(stream) > 0 {
			stream = stream[:rnd.IntN(len(stream))]
		}
		want, wantErr := readFramesSimply(bytes.NewReader(stream), 0)
		splits := make([]byte, 1+rnd.IntN(20))
		for i := range splits {
			splits[i] = byte(rnd.Int())
		}
		readers := map[string]io.Reader{
			"at once":        bytes.NewReader(stream),
			"split":          &splitReader{r: bytes.NewReader(stream), sizes: splits},
			"end with data":  iotest.DataErrReader(bytes.NewReader(stream)),
			"half":           iotest.HalfReader(bytes.NewReader(stream)),
			"end with split": iotest.DataErrReader(&splitReader{r: bytes.NewReader(stream), sizes: splits}),
		}
		if len(stream) < 100_000 {
			readers["single bytes"] = iotest.OneByteReader(bytes.NewReader(stream))
		}
		for name, r := range readers {
			got, err := readFrames(r, 0)
			require.Equal(t, wantErr, err, name)
			require.Len(t, got, len(want), name)
			for i := range want {
				require.True(t, want[i] == got[i], "round %d, %s: frame %d differs", round, name, i)
			}
		}
	}
}

func TestFrameReaderErrors(t *testing.T) {
	frame := string(appendFrame(nil, FrameTypeResponse, []byte("OK")))
	tests := map[string]struct {
		in     string
		limit  int32
		frames int
		err    error
		size   *FrameSizeError
	}{
		"end at once":                  {in: "", err: io.EOF},
		"end between frames":           {in: frame + frame, frames: 2, err: io.EOF},
		"end in the size":              {in: frame + "\x00", frames: 1, err: io.ErrUnexpectedEOF},
		"end in the type":              {in: frame + sized(6, "\x00"), frames: 1, err: io.ErrUnexpectedEOF},
		"end before the data":          {in: frame + sized(6, "\x00\x00\x00\x00"), frames: 1, err: io.ErrUnexpectedEOF},
		"end before large data":        {in: frame + sized(1<<20, "\x00\x00\x00\x00"), frames: 1, err: io.ErrUnexpectedEOF},
		"end in large data":            {in: frame + sized(1<<20, strings.Repeat("x", 100000)), frames: 1, err: io.ErrUnexpectedEOF},
		"negative":                     {in: frame + sized(-1, ""), frames: 1, size: &FrameSizeError{Size: -1, Max: defaultMaxFrame}},
		"as negative as can be":        {in: sized(math.MinInt32, "\x00\x00\x00\x00"), size: &FrameSizeError{Size: math.MinInt32, Max: defaultMaxFrame}},
		"size 0":                       {in: sized(0, "\x00\x00\x00\x00"), size: &FrameSizeError{Size: 0}},
		"size 3":                       {in: sized(3, "\x00\x00\x00\x00"), size: &FrameSizeError{Size: 3}},
		"size 3, nothing behind":       {in: sized(3, ""), size: &FrameSizeError{Size: 3}},
		"size 4":                       {in: sized(4, "\x00\x00\x00\x00"), frames: 1, err: io.EOF},
		"the largest":                  {in: sized(math.MaxInt32, "\x00\x00\x00\x00"), size: &FrameSizeError{Size: math.MaxInt32, Max: defaultMaxFrame}},
		"at the limit":                 {in: frame, limit: 6, frames: 1, err: io.EOF},
		"over the limit":               {in: frame, limit: 5, size: &FrameSizeError{Size: 6, Max: 5}},
		"large and over the limit":     {in: sized(1<<20, "\x00\x00\x00\x00"), limit: 1<<20 - 1, size: &FrameSizeError{Size: 1 << 20, Max: 1<<20 - 1}},
		"HTTP":                         {in: "HTTP/1.1 400 Bad Request\r\n", err: ErrHTTPResponse},
		"HTTP behind a frame":          {in: frame + "HTTP", frames: 1, err: ErrHTTPResponse},
		"HTTP under the largest limit": {in: "HTTP/1.1", limit: math.MaxInt32, err: ErrHTTPResponse},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(tt.in), iotest.OneByteReader(strings.NewReader(tt.in))} {
				frames, err := readFrames(r, tt.limit)
				require.Len(t, frames, tt.frames)
				if tt.size != nil {
					require.Equal(t, tt.size, err)
				} else {
					require.Equal(t, tt.err, err)
				}
			}
		})
	}
}

func TestFrameReaderErrorOfNextStays(t *testing.T) {
	f := newFrameReader(strings.NewReader("HTTP"), 0)
	require.NoError(t, f.fill())
	for range 3 {
		_, _, _, ok, err := f.next()
		require.False(t, ok)
		require.Equal(t, ErrHTTPResponse, err)
	}
}

// A web server is recognised by its first four bytes, though a header has eight.
func TestFrameReaderJudgesSizeEarly(t *testing.T) {
	for in, want := range map[string]string{"HTTP": "HTTP", "\xff\xff\xff\xff": "negative", "\x00\x00\x00\x01": "too small"} {
		f := newFrameReader(strings.NewReader(in), 0)
		require.NoError(t, f.fill())
		_, _, _, _, err := f.next()
		require.ErrorContains(t, err, want)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestFrameReaderNoProgress(t *testing.T) {
	reads := 0
	f := newFrameReader(readerFunc(func([]byte) (int, error) { reads++; return 0, nil }), 0)
	require.Equal(t, io.ErrNoProgress, f.fill())
	require.Equal(t, 100, reads)
}

// A deadline may pass in mid-frame and with bytes; the stream goes on where it was.
func TestFrameReaderGoesOnAfterTimeout(t *testing.T) {
	want := strings.Repeat("x", 100_000)
	stream := bytes.NewReader(appendFrame(appendFrame(nil, FrameTypeResponse, []byte("OK")), FrameTypeMessage, []byte(want)))
	reads := 0
	f := newFrameReader(readerFunc(func(p []byte) (int, error) {
		switch reads++; reads % 3 {
		case 0:
			return 0, os.ErrDeadlineExceeded
		case 1:
			n, _ := stream.Read(p[:min(len(p), 5)])
			return n, os.ErrDeadlineExceeded // bytes and an error
		}
		return stream.Read(p[:min(len(p), 5000)])
	}), 0)
	var got []string
	timeouts := 0
	for len(got) < 2 {
		_, data, body, ok, err := f.next()
		require.NoError(t, err)
		if ok {
			got = append(got, string(data)+string(body))
			continue
		}
		if err := f.fill(); err != nil {
			require.Equal(t, os.ErrDeadlineExceeded, err)
			timeouts++
		}
	}
	require.Equal(t, []string{"OK", want}, got)
	require.Greater(t, timeouts, 10)
}

func TestFrameReaderPassesErrorsOn(t *testing.T) {
	boom := errors.New("boom")
	for _, in := range []string{"", "\x00\x00", sized(1<<20, "\x00\x00\x00\x02data")} {
		_, err := readFrames(io.MultiReader(strings.NewReader(in), iotest.ErrReader(boom)), 0)
		require.Same(t, boom, err)
	}
}

// endless gives the same bytes again and again, as many as fit.
type endless struct {
	data []byte
	off  int
}

func (e *endless) Read(p []byte) (n int, err error) {
	for n < len(p) {
		m := copy(p[n:], e.data[e.off:])
		n += m
		e.off = (e.off + m) % len(e.data)
	}
	return n, nil
}

func TestFrameReaderBufferFollowsUse(t *testing.T) {
	data := appendFrame(nil, FrameTypeMessage, make([]byte, 126))
	src := &endless{data: data}
	limit := 0 // bytes of a read, 0 for all that fits
	f := newFrameReader(readerFunc(func(p []byte) (int, error) {
		if limit > 0 {
			p = p[:min(limit, len(p))]
		}
		return src.Read(p)
	}), 0)
	drainAndFill := func() {
		for {
			_, _, _, ok, err := f.next()
			require.NoError(t, err)
			if !ok {
				break
			}
		}
		require.NoError(t, f.fill())
	}
	require.Len(t, f.buf, 4<<10)

	var sizes []int
	for range 6 {
		drainAndFill()
		sizes = append(sizes, len(f.buf)>>10)
	}
	require.Equal(t, []int{4, 8, 16, 32, 64, 64}, sizes)

	limit = len(data) - f.end%len(data) // up to the end of a frame, then frame by frame
	drainAndFill()
	limit = len(data)
	for i := range 8 {
		require.Len(t, f.buf, 64<<10, i)
		drainAndFill()
	}
	require.Len(t, f.buf, 4<<10)
	for range 20 {
		drainAndFill()
		require.Len(t, f.buf, 4<<10)
	}

	// Now and then a large read keeps the buffer.
	limit = 0
	for range 6 {
		drainAndFill()
	}
	for range 20 {
		limit = 40 * len(data)
		drainAndFill()
		limit = len(data)
		for range 5 {
			drainAndFill()
		}
		require.Len(t, f.buf, 64<<10)
	}
}

func TestFrameReaderMediumFramesGrowTheBuffer(t *testing.T) {
	frames, err := readFrames(bytes.NewReader(appendFrame(nil, FrameTypeMessage, make([]byte, largeFrame))), 0)
	require.Equal(t, io.EOF, err)
	require.Len(t, frames, 1)
	require.Len(t, frames[0].data, largeFrame)
}

func TestFrameReaderOwnership(t *testing.T) {
	stream := appendFrame(nil, FrameTypeMessage, make([]byte, largeFrame))
	stream = appendFrame(stream, FrameTypeMessage, make([]byte, largeFrame+1))
	f := newFrameReader(bytes.NewReader(stream), 0)
	var got []bool
	for len(got) < 2 {
		_, _, body, ok, err := f.next()
		require.NoError(t, err)
		if ok {
			got = append(got, body != nil)
			continue
		}
		require.NoError(t, f.fill())
	}
	require.Equal(t, []bool{false, true}, got)
}

func TestFrameReaderMemoryFollowsBytes(t *testing.T) {
	for name, tt := range map[string]struct{ received, atMost int }{
		"announced only": {0, 128 << 10},
		"100 bytes":      {100, 128 << 10},
		"1 MiB":          {1 << 20, 5 << 20},
	} {
		in := strings.NewReader(sized(100<<20, strings.Repeat("x", tt.received)))
		n := allocated(func() {
			_, err := readFrames(in, 0)
			require.Equal(t, io.ErrUnexpectedEOF, err)
		})
		require.LessOrEqual(t, n, uint64(tt.atMost), name)
	}
}

// Once a peer has sent a large frame, the next of its size is one allocation.
func TestFrameReaderLargeFramesAreOneAllocation(t *testing.T) {
	f := newFrameReader(&endless{data: appendFrame(nil, FrameTypeMessage, make([]byte, 1<<20))}, 0)
	read := func() {
		for {
			_, data, body, ok, err := f.next()
			if err == nil && !ok {
				err = f.fill()
			}
			if err != nil {
				panic(err)
			}
			if ok {
				require.Len(t, data, messageHeaderSize)
				require.Len(t, body, 1<<20-messageHeaderSize)
				require.Equal(t, len(body), cap(body))
				return
			}
		}
	}
	for range 10 {
		read()
	}
	n := allocated(read)
	require.Less(t, n, uint64(1<<20+8<<10))
}

func FuzzFrameReader(f *testing.F) {
	frames := appendFrame(appendFrame(nil, FrameTypeResponse, []byte("OK")), FrameTypeMessage, make([]byte, 300))
	f.Add(frames, []byte{1, 0, 7, 201}, int32(0), uint32(0))
	f.Add(frames, []byte{3}, int32(100), uint32(20000))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n"), []byte{2}, int32(0), uint32(0))
	f.Add([]byte("\xff\xff\xff\xff"), []byte{}, int32(0), uint32(70000))
	f.Add([]byte("\x00\x00\x00\x03\x00\x00\x00"), []byte{0}, int32(0), uint32(65528))
	f.Fuzz(func(t *testing.T, tail, splits []byte, limit int32, large uint32) {
		var stream []byte
		if large > 0 { // the fuzzer would not find large frames by itself
			stream = appendFrame(stream, 5, bytes.Repeat([]byte{'l'}, int(large%200_000)))
		}
		stream = append(stream, tail...)
		want, wantErr := readFramesSimply(bytes.NewReader(stream), limit)
		got, err := readFrames(&splitReader{r: bytes.NewReader(stream), sizes: splits}, limit)
		require.Equal(t, want, got)

		// Memory follows the bytes that have come, not the sizes that were announced.
		r := newFrameReader(&splitReader{r: bytes.NewReader(stream), sizes: splits}, limit)
		for read := 0; ; {
			_, data, body, ok, err := r.next()
			if err == nil && !ok {
				err = r.fill()
			}
			if err != nil {
				break
			}
			if ok {
				read += frameHeader + len(data) + len(body)
			}
			requireFrameMemory(t, r, read)
		}

		var size *FrameSizeError
		if errors.As(err, &size) && size.Max == 0 && wantErr == io.ErrUnexpectedEOF {
			return // a size is judged before its data have come, so one that is too small is found before the end is
		}
		require.Equal(t, wantErr, err)
	})
}

func BenchmarkFrameReader(b *testing.B) {
	for _, bench := range []struct {
		name string
		size int
	}{{"100B", 126}, {"1KiB", 26 + 1<<10}, {"16KiB", 26 + 16<<10}, {"1MiB", 26 + 1<<20}} {
		b.Run(bench.name, func(b *testing.B) {
			f := newFrameReader(&endless{data: appendFrame(nil, FrameTypeMessage, make([]byte, bench.size))}, 0)
			b.ReportAllocs()
			b.SetBytes(int64(bench.size + 8))
			for b.Loop() {
				for {
					_, data, body, ok, err := f.next()
					if err != nil {
						b.Fatal(err)
					}
					if ok {
						if n := len(data) + len(body); n != bench.size {
							b.Fatal(n)
						}
						break
					}
					if err := f.fill(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
