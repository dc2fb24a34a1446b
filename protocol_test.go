package nsq

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

func TestConstantsHaveTheirTypes(t *testing.T) {
	require.IsType(t, int32(0), FrameTypeResponse)
	require.Equal(t, []int32{0, 1, 2}, []int32{FrameTypeResponse, FrameTypeError, FrameTypeMessage})
	var i8 int8 = StateConnected // untyped
	require.EqualValues(t, 2, i8)
	require.Equal(t, []int{0, 1, 2}, []int{StateInit, StateDisconnected, StateConnected})
	require.Equal(t, "  V1", string(MagicV1))
	require.Equal(t, "  V2", string(MagicV2))
	require.Len(t, [MsgIDLength]byte{}, 16)
}

func TestNames(t *testing.T) {
	tests := map[string]struct {
		name  string
		valid bool
	}{
		"plain":                         {"orders", true},
		"all kinds of characters":       {"a.Z_0-9", true},
		"one character":                 {"a", true},
		"a dot":                         {".", true},
		"64 characters":                 {strings.Repeat("a", 64), true},
		"65 characters":                 {strings.Repeat("a", 65), false},
		"ephemeral":                     {"a#ephemeral", true},
		"64 characters with ephemeral":  {strings.Repeat("a", 54) + "#ephemeral", true},
		"65 characters with ephemeral":  {strings.Repeat("a", 55) + "#ephemeral", false},
		"empty":                         {"", false},
		"only ephemeral":                {"#ephemeral", false},
		"ephemeral twice":               {"a#ephemeral#ephemeral", false},
		"ephemeral in front":            {"#ephemerala", false},
		"ephemeral in capitals":         {"a#EPHEMERAL", false},
		"another suffix":                {"a#b", false},
		"blank":                         {"a b", false},
		"blank at the end":              {"a ", false},
		"line end":                      {"a\n", false},
		"NUL":                           {"a\x00", false},
		"slash":                         {"a/b", false},
		"no ASCII":                      {"ä", false},
		"no UTF-8":                      {"\xff", false},
		"the characters next to ranges": {"`{@[/:", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tt.valid, IsValidTopicName(tt.name))
			require.Equal(t, tt.valid, IsValidChannelName(tt.name))
		})
	}
	for c := range 256 {
		valid := strings.ContainsRune(".abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-", rune(c)) && c < 128
		require.Equal(t, valid, IsValidTopicName(string([]byte{byte(c)})), c)
	}
}

// appendFrame appends a frame as nsqd sends it.
func appendFrame(dst []byte, frameType int32, data []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(4+len(data)))
	dst = binary.BigEndian.AppendUint32(dst, uint32(frameType))
	return append(dst, data...)
}

func sized(size int32, data string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(size))) + data
}

func TestReadResponse(t *testing.T) {
	tests := map[string]struct {
		in   string
		max  []int32
		want string
		err  error  // by errors.Is
		text string // in the error's text
	}{
		"a block":                          {in: sized(2, "OKrest"), want: "OK"},
		"an empty block":                   {in: sized(0, "rest"), want: ""},
		"as large as allowed":              {in: sized(2, "OK"), max: []int32{2}, want: "OK"},
		"one more than allowed":            {in: sized(3, "OK!"), max: []int32{2}, text: "frame size 3 is over the limit of 2 bytes"},
		"a limit of 0 is none":             {in: sized(2, "OK"), max: []int32{0}, want: "OK"},
		"a limit below 0 is none":          {in: sized(2, "OK"), max: []int32{-5}, want: "OK"},
		"beyond the default limit":         {in: sized(128<<20+1, ""), text: "frame size 134217729 is over the limit"},
		"... even with a limit of 0":       {in: sized(math.MaxInt32, ""), max: []int32{0}, text: "over the limit"},
		"negative":                         {in: sized(-1, "OK"), text: "negative frame size -1"},
		"as negative as can be":            {in: sized(math.MinInt32, "OK"), max: []int32{math.MaxInt32}, text: "negative"},
		"HTTP":                             {in: "HTTP/1.1 400 Bad Request\r\n", err: ErrHTTPResponse, text: "unexpected HTTP response, a nsqd TCP endpoint is required"},
		"HTTP, with a small limit":         {in: "HTTP", max: []int32{10}, err: ErrHTTPResponse},
		"HTTP, with the largest limit":     {in: "HTTP", max: []int32{math.MaxInt32}, err: ErrHTTPResponse},
		"nothing":                          {in: "", err: io.EOF},
		"end in the size":                  {in: "\x00\x00", err: io.ErrUnexpectedEOF},
		"end before the data":              {in: sized(2, ""), err: io.ErrUnexpectedEOF},
		"end in the data":                  {in: sized(2, "O"), err: io.ErrUnexpectedEOF},
		"end after the first step":         {in: sized(100<<20, strings.Repeat("x", firstRead)), err: io.ErrUnexpectedEOF},
		"end in the second step":           {in: sized(100<<20, strings.Repeat("x", firstRead+1)), err: io.ErrUnexpectedEOF},
		"a block of several steps":         {in: sized(1<<20, strings.Repeat("x", 1<<20)), want: strings.Repeat("x", 1<<20)},
		"a block of several steps, uneven": {in: sized(firstRead*2+1, strings.Repeat("x", firstRead*2+1)), want: strings.Repeat("x", firstRead*2+1)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, r := range []io.Reader{
				strings.NewReader(tt.in),
				iotest.HalfReader(strings.NewReader(tt.in)),
				iotest.DataErrReader(strings.NewReader(tt.in)),
			} {
				got, err := ReadResponse(r, tt.max...)
				if tt.err == nil && tt.text == "" {
					require.NoError(t, err)
					require.Equal(t, tt.want, string(got))
					continue
				}
				require.Error(t, err)
				require.Nil(t, got)
				if tt.err != nil {
					require.ErrorIs(t, err, tt.err)
				} else {
					var size *FrameSizeError
					require.ErrorAs(t, err, &size)
				}
				require.ErrorContains(t, err, tt.text)

				frameType, data, err2 := ReadUnpackedResponse(strings.NewReader(tt.in), tt.max...)
				require.Equal(t, err, err2)
				require.EqualValues(t, -1, frameType)
				require.Nil(t, data)
			}
		})
	}
}

func TestReadResponsePassesErrorsOn(t *testing.T) {
	boom := errors.New("boom")
	_, err := ReadResponse(iotest.ErrReader(boom))
	require.Same(t, boom, err)
	_, err = ReadResponse(io.MultiReader(strings.NewReader(sized(5, "12")), iotest.ErrReader(boom)))
	require.Same(t, boom, err)
}

func TestUnpackResponse(t *testing.T) {
	frameType, data, err := UnpackResponse([]byte("\x00\x00\x00\x02message"))
	require.NoError(t, err)
	require.Equal(t, FrameTypeMessage, frameType)
	require.Equal(t, "message", string(data))

	frameType, data, err = UnpackResponse([]byte("\xff\xff\xff\xff"))
	require.NoError(t, err)
	require.EqualValues(t, -1, frameType)
	require.Empty(t, data)

	for _, short := range []string{"", "\x00", "\x00\x00\x00"} {
		frameType, data, err = UnpackResponse([]byte(short))
		var size *FrameSizeError
		require.ErrorAs(t, err, &size)
		require.EqualValues(t, len(short), size.Size)
		require.ErrorContains(t, err, "too small")
		require.EqualValues(t, -1, frameType)
		require.Nil(t, data)
	}
}

func TestReadUnpackedResponse(t *testing.T) {
	r := bytes.NewReader(appendFrame(appendFrame(nil, FrameTypeResponse, []byte("OK")), 7, nil))
	frameType, data, err := ReadUnpackedResponse(r)
	require.NoError(t, err)
	require.Equal(t, FrameTypeResponse, frameType)
	require.Equal(t, "OK", string(data))
	frameType, data, err = ReadUnpackedResponse(r, 4)
	require.NoError(t, err)
	require.EqualValues(t, 7, frameType)
	require.Empty(t, data)
	_, _, err = ReadUnpackedResponse(r)
	require.Equal(t, io.EOF, err)

	for size := range int32(4) {
		_, _, err = ReadUnpackedResponse(strings.NewReader(sized(size, "\x00\x00\x00")))
		require.ErrorContains(t, err, "too small", size)
	}
}

// allocated runs f and returns how many bytes it took from the heap.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestReadResponseMemoryFollowsBytes(t *testing.T) {
	for name, tt := range map[string]struct{ received, atMost int }{
		"announced only": {0, 128 << 10},
		"100 bytes":      {100, 128 << 10},
		"1 MiB":          {1 << 20, 5 << 20},
	} {
		in := strings.NewReader(sized(100<<20, strings.Repeat("x", tt.received)))
		n := allocated(func() {
			_, err := ReadResponse(in)
			require.Equal(t, io.ErrUnexpectedEOF, err)
		})
		require.LessOrEqual(t, n, uint64(tt.atMost), name)
	}
}

func FuzzReadUnpackedResponse(f *testing.F) {
	f.Add([]byte{}, int32(0))
	f.Add(appendFrame(nil, FrameTypeResponse, []byte("OK")), int32(0))
	f.Add(appendFrame(nil, FrameTypeMessage, make([]byte, 200)), int32(100))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n"), int32(0))
	f.Add([]byte("\xff\xff\xff\xff\x00\x00\x00\x01"), int32(0))
	f.Add([]byte("\x7f\xff\xff\xff\x00\x00\x00\x01"), int32(math.MaxInt32))
	f.Add(appendFrame(nil, FrameTypeMessage, make([]byte, 3*firstRead))[:firstRead+9], int32(0))
	f.Add([]byte("\x00\x00\x00\x03abc"), int32(0))
	f.Fuzz(func(t *testing.T, in []byte, limit int32) {
		r := bytes.NewReader(in)
		// Memory follows the bytes that came: what is asked for next is never much more than what is there already.
		frameType, data, err := ReadUnpackedResponse(readerFunc(func(p []byte) (int, error) {
			require.LessOrEqual(t, len(p), max(firstRead, len(in)-r.Len()))
			return r.Read(p)
		}), limit)

		block, blockErr := ReadResponse(bytes.NewReader(in), limit)
		if blockErr == nil {
			unpackedType, unpacked, unpackErr := UnpackResponse(block)
			require.Equal(t, []any{unpackedType, unpacked, unpackErr}, []any{frameType, data, err}, "both in one")
		} else {
			require.Equal(t, blockErr, err)
		}
		if err != nil {
			require.EqualValues(t, -1, frameType)
			require.Nil(t, data)
			var size *FrameSizeError
			switch {
			case len(in) == 0:
				require.Equal(t, io.EOF, err)
			case len(in) < 4:
				require.Equal(t, io.ErrUnexpectedEOF, err)
			case string(in[:4]) == "HTTP":
				require.Equal(t, ErrHTTPResponse, err)
			case errors.As(err, &size):
				require.Equal(t, int64(int32(binary.BigEndian.Uint32(in))), size.Size)
				require.True(t, size.Size < 4 || size.Size > int64(size.Max) && size.Max == frameLimit(limit), "%v", err)
			default:
				require.Equal(t, io.ErrUnexpectedEOF, err)
				require.Less(t, len(in)-4, int(binary.BigEndian.Uint32(in)))
			}
			return
		}
		// A frame that was understood is the start of the input, byte for byte.
		again := appendFrame(nil, frameType, data)
		require.Equal(t, in[:len(again)], again)
		require.Equal(t, len(in)-len(again), r.Len())
		if limit > 0 {
			require.LessOrEqual(t, len(data)+4, int(limit))
		}
	})
}
