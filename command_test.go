package nsq

import (
	"bytes"
	"errors"
	"io"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var testID = MessageID([]byte("0123456789abcdef"))

func mustCommand(t *testing.T) func(*Command, error) *Command {
	return func(c *Command, err error) *Command {
		t.Helper()
		require.NoError(t, err)
		return c
	}
}

func TestCommandBytes(t *testing.T) {
	ok := mustCommand(t)
	tests := map[string]struct {
		cmd  *Command
		wire string
		line string
	}{
		"IDENTIFY":             {ok(Identify(map[string]interface{}{"a": 1, "b": "x"})), "IDENTIFY\n\x00\x00\x00\x0f" + `{"a":1,"b":"x"}`, "IDENTIFY"},
		"IDENTIFY of nothing":  {ok(Identify(nil)), "IDENTIFY\n\x00\x00\x00\x04null", "IDENTIFY"},
		"AUTH":                 {ok(Auth("secret")), "AUTH\n\x00\x00\x00\x06secret", "AUTH"},
		"AUTH, empty":          {ok(Auth("")), "AUTH\n\x00\x00\x00\x00", "AUTH"},
		"SUB":                  {Subscribe("t", "c#ephemeral"), "SUB t c#ephemeral\n", "SUB t c#ephemeral"},
		"RDY":                  {Ready(2500), "RDY 2500\n", "RDY 2500"},
		"RDY 0":                {Ready(0), "RDY 0\n", "RDY 0"},
		"RDY below 0":          {Ready(-1), "RDY 0\n", "RDY 0"},
		"FIN":                  {Finish(testID), "FIN 0123456789abcdef\n", "FIN 0123456789abcdef"},
		"REQ":                  {Requeue(testID, 90*time.Second), "REQ 0123456789abcdef 90000\n", "REQ 0123456789abcdef 90000"},
		"REQ at once":          {Requeue(testID, 0), "REQ 0123456789abcdef 0\n", "REQ 0123456789abcdef 0"},
		"REQ, no whole ms":     {Requeue(testID, 1999*time.Microsecond), "REQ 0123456789abcdef 1\n", "REQ 0123456789abcdef 1"},
		"REQ -1 ns":            {Requeue(testID, -1), "REQ 0123456789abcdef 0\n", "REQ 0123456789abcdef 0"},
		"REQ below 0":          {Requeue(testID, math.MinInt64), "REQ 0123456789abcdef 0\n", "REQ 0123456789abcdef 0"},
		"REQ of an hour":       {Requeue(testID, time.Hour), "REQ 0123456789abcdef 3600000\n", "REQ 0123456789abcdef 3600000"},
		"REQ above an hour":    {Requeue(testID, math.MaxInt64), "REQ 0123456789abcdef 3600000\n", "REQ 0123456789abcdef 3600000"},
		"TOUCH":                {Touch(testID), "TOUCH 0123456789abcdef\n", "TOUCH 0123456789abcdef"},
		"CLS":                  {StartClose(), "CLS\n", "CLS"},
		"NOP":                  {Nop(), "NOP\n", "NOP"},
		"PUB":                  {Publish("t", []byte("body")), "PUB t\n\x00\x00\x00\x04body", "PUB t"},
		"PUB without a body":   {Publish("t", nil), "PUB t\n\x00\x00\x00\x00", "PUB t"},
		"DPUB":                 {DeferredPublish("t", 1500*time.Microsecond, []byte("b")), "DPUB t 1\n\x00\x00\x00\x01b", "DPUB t 1"},
		"DPUB as it is":        {DeferredPublish("t", -time.Second, []byte("b")), "DPUB t -1000\n\x00\x00\x00\x01b", "DPUB t -1000"},
		"DPUB without a body":  {DeferredPublish("t", 0, nil), "DPUB t 0\n\x00\x00\x00\x00", "DPUB t 0"},
		"MPUB":                 {ok(MultiPublish("t", [][]byte{[]byte("a"), nil, []byte("bc")})), "MPUB t\n\x00\x00\x00\x13\x00\x00\x00\x03\x00\x00\x00\x01a\x00\x00\x00\x00\x00\x00\x00\x02bc", "MPUB t"},
		"MPUB of nothing":      {ok(MultiPublish("t", nil)), "MPUB t\n\x00\x00\x00\x04\x00\x00\x00\x00", "MPUB t"},
		"REGISTER":             {Register("t", "c"), "REGISTER t c\n", "REGISTER t c"},
		"REGISTER a topic":     {Register("t", ""), "REGISTER t\n", "REGISTER t"},
		"UNREGISTER":           {UnRegister("t", "c"), "UNREGISTER t c\n", "UNREGISTER t c"},
		"UNREGISTER a topic":   {UnRegister("t", ""), "UNREGISTER t\n", "UNREGISTER t"},
		"PING":                 {Ping(), "PING\n", "PING"},
		"by hand":              {&Command{[]byte("X"), [][]byte{[]byte("1"), nil}, []byte{}}, "X 1 \n\x00\x00\x00\x00", "X 1 "},
		"by hand, body is nil": {&Command{[]byte("X"), nil, nil}, "X\n", "X"},
		"nothing":              {&Command{}, "\n", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var w countingWriter
			n, err := tt.cmd.WriteTo(&w)
			require.NoError(t, err)
			require.Equal(t, tt.wire, w.String())
			require.EqualValues(t, len(tt.wire), n)
			require.Equal(t, 1, w.writes)
			require.Equal(t, tt.line, tt.cmd.String())
			require.Equal(t, "before "+tt.wire, string(appendCommand([]byte("before "), tt.cmd)))
		})
	}
}

type countingWriter struct {
	bytes.Buffer
	writes int
}

func (w *countingWriter) Write(p []byte) (int, error) {
	w.writes++
	return w.Buffer.Write(p)
}

func TestAppendFormsEqualBuilders(t *testing.T) {
	wire := func(c *Command) string {
		var b bytes.Buffer
		_, err := c.WriteTo(&b)
		require.NoError(t, err)
		return b.String()
	}
	require.Equal(t, wire(Finish(testID)), string(appendFinish(nil, testID)))
	require.Equal(t, wire(Touch(testID)), string(appendTouch(nil, testID)))
	for _, d := range []time.Duration{math.MinInt64, -time.Hour, -1, 0, 1, 999999, time.Millisecond, 90 * time.Second, time.Hour - 1, time.Hour, time.Hour + 1, math.MaxInt64} {
		require.Equal(t, wire(Requeue(testID, d)), string(appendRequeue(nil, testID, d)), d)
	}
	for _, n := range []int{math.MinInt32, -1, 0, 1, 9, 10, 2500, math.MaxInt32} {
		require.Equal(t, wire(Ready(n)), string(appendReady(nil, int64(n))), n)
	}
}

func TestAppendFormsDoNotAllocate(t *testing.T) {
	dst := make([]byte, 0, 4096)
	nop := Nop()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		b := appendFinish(dst, testID)
		b = appendRequeue(b, testID, time.Minute)
		b = appendTouch(b, testID)
		b = appendReady(b, math.MaxInt64)
		_ = appendCommand(b, nop)
	}))
}

func TestIdentifyRefusesWhatIsNoJSON(t *testing.T) {
	_, err := Identify(map[string]interface{}{"f": func() {}})
	require.ErrorContains(t, err, "IDENTIFY")
}

func TestMultiPublishTooLarge(t *testing.T) {
	mib := make([]byte, 1<<20)
	bodies := make([][]byte, 2048)
	for i := range bodies {
		bodies[i] = mib // one body many times, so the test needs no 2 GiB
	}
	_, err := MultiPublish("t", bodies)
	require.ErrorContains(t, err, "MPUB")
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestWriteToReportsFailures(t *testing.T) {
	boom := errors.New("boom")
	n, err := Nop().WriteTo(writerFunc(func([]byte) (int, error) { return 2, boom }))
	require.Same(t, boom, err)
	require.EqualValues(t, 2, n)

	n, err = Nop().WriteTo(writerFunc(func([]byte) (int, error) { return 3, nil }))
	require.Equal(t, io.ErrShortWrite, err)
	require.EqualValues(t, 3, n)
}

func BenchmarkAppendFinish(b *testing.B) {
	b.ReportAllocs()
	dst := make([]byte, 0, 64)
	for b.Loop() {
		dst = appendFinish(dst[:0], testID)
	}
}
