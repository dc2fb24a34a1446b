package nsq

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestTextsOfGoNSQ(t *testing.T) {
	for want, err := range map[string]error{
		"not connected":                      ErrNotConnected,
		"stopped":                            ErrStopped,
		"closing":                            ErrClosing,
		"already connected":                  ErrAlreadyConnected,
		"over configure max-inflight":        ErrOverMaxInFlight,
		"consumer stopped":                   errConsumerStopped,
		"no handlers":                        errNoHandlers,
		"missing port":                       errMissingPort,
		"failed to IDENTIFY - E_BAD_BODY no": ErrIdentify{"E_BAD_BODY no"},
		"E_BAD_TOPIC no":                     ErrProtocol{"E_BAD_TOPIC no"},
		"":                                   ErrProtocol{},
	} {
		require.Equal(t, want, err.Error())
	}
}

func TestErrorsOfTheLibraryHaveAPrefix(t *testing.T) {
	for _, err := range []error{
		ErrHeartbeatTimeout, ErrConnectionLost, ErrHTTPResponse, ErrTLSRefused, ErrMessageExpired, ErrMessageLost, ErrNotLookupd, errTopicNotFound,
		&TooManyUnansweredError{Unanswered: 2000, MaxRDY: 5}, &FrameSizeError{Size: -1}, &FrameSizeError{Size: 3}, &FrameSizeError{Size: 30, Max: 20},
		&UnexpectedFrameError{Type: 7}, &TimeoutError{Step: "SUB"}, &AddressError{Address: "x", Reason: "y"}, &LookupdError{Address: "http://x", Err: os.ErrClosed},
		&ProtocolError{},
	} {
		require.Regexp(t, `^nsq: [^\n]+[^ .:]$`, err.Error())
	}
	require.EqualError(t, &TooManyUnansweredError{Unanswered: 2000, MaxRDY: 5}, "nsq: nsqd sends more than RDY allows: the connection holds 2000 messages, RDY was at most 5")
	require.EqualError(t, &UnexpectedFrameError{Type: 7}, "nsq: unexpected frame type 7")
}

func TestParseProtocolError(t *testing.T) {
	tests := map[string]struct {
		data       string
		code, desc string
		text       string
		notFatal   bool
	}{
		"code and text":            {data: "E_BAD_TOPIC SUB topic name \"a b\" is not valid", code: "E_BAD_TOPIC", desc: "SUB topic name \"a b\" is not valid", text: "E_BAD_TOPIC SUB topic name \"a b\" is not valid"},
		"code alone":               {data: "E_INVALID", code: "E_INVALID", text: "E_INVALID"},
		"late FIN":                 {data: "E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight", code: "E_FIN_FAILED", desc: "FIN 0123456789abcdef failed ID not in flight", text: "E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight", notFatal: true},
		"late REQ":                 {data: "E_REQ_FAILED", code: "E_REQ_FAILED", text: "E_REQ_FAILED", notFatal: true},
		"late TOUCH":               {data: "E_TOUCH_FAILED ", code: "E_TOUCH_FAILED", text: "E_TOUCH_FAILED", notFatal: true},
		"late TOUCH, a colon":      {data: "E_TOUCH_FAILED: x", code: "E_TOUCH_FAILED", desc: ": x", text: "E_TOUCH_FAILED : x", notFatal: true},
		"late TOUCH, a line end":   {data: "E_TOUCH_FAILED\nx", code: "E_TOUCH_FAILED", desc: "x", text: "E_TOUCH_FAILED x", notFatal: true},
		"late TOUCH, a NUL":        {data: "E_TOUCH_FAILED\x00", code: "E_TOUCH_FAILED", desc: `\x00`, text: `E_TOUCH_FAILED \x00`, notFatal: true},
		"a longer code":            {data: "E_FIN_FAILED_TOO x", code: "E_FIN_FAILED_TOO", desc: "x", text: "E_FIN_FAILED_TOO x"},
		"no code":                  {data: "something went wrong", desc: "something went wrong", text: "something went wrong"},
		"no code but nearly":       {data: "E_FIN_FAILEDx", desc: "E_FIN_FAILEDx", text: "E_FIN_FAILEDx"},
		"small letters":            {data: "e_fin_failed x", desc: "e_fin_failed x", text: "e_fin_failed x"},
		"nothing":                  {data: "", text: "nsq: an error without a text from nsqd"},
		"forged log line":          {data: "E_INVALID x\nINF    1 [t/c] all is well\r\x1b[2J", code: "E_INVALID", desc: `x\nINF    1 [t/c] all is well\r\x1b[2J`, text: `E_INVALID x\nINF    1 [t/c] all is well\r\x1b[2J`},
		"no UTF-8":                 {data: "E_INVALID \xff\xfeä\u202e\u2028.", code: "E_INVALID", desc: `\xff\xfeä\u202e\u2028.`, text: `E_INVALID \xff\xfeä\u202e\u2028.`},
		"the replacement itself":   {data: "E_INVALID \ufffd", code: "E_INVALID", desc: "\ufffd", text: "E_INVALID \ufffd"},
		"huge":                     {data: "E_INVALID " + strings.Repeat("x", 1<<20), code: "E_INVALID", desc: strings.Repeat("x", 502), text: "E_INVALID " + strings.Repeat("x", 502)},
		"huge, cut at a character": {data: "E_INVALID " + strings.Repeat("x", 501) + "ää", code: "E_INVALID", desc: strings.Repeat("x", 501), text: "E_INVALID " + strings.Repeat("x", 501)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := parseProtocolError([]byte(tt.data))
			require.Equal(t, ProtocolError{Code: tt.code, Desc: tt.desc}, *err)
			require.Equal(t, tt.text, err.Error())
			require.Equal(t, !tt.notFatal, err.Fatal())
		})
	}
}

func TestProtocolErrorMessageID(t *testing.T) {
	for text, found := range map[string]bool{
		"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight":            true,
		"E_REQ_FAILED REQ 0123456789abcdef failed client does not own message": true,
		"E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight":        true,
		"E_TOUCH_FAILED TOUCH 0123456789abcdef":                                true,
		"E_FIN_FAILED":                                                         false,
		"E_FIN_FAILED FIN":                                                     false,
		"E_FIN_FAILED FIN 0123456789abcde failed":                              false,
		"E_FIN_FAILED FIN 0123456789abcdef0 failed":                            false,
		"E_FIN_FAILED PUB 0123456789abcdef failed":                             false,
		"E_INVALID FIN 0123456789abcdef failed":                                false,
		"FIN 0123456789abcdef failed":                                          false,
	} {
		id, ok := parseProtocolError([]byte(text)).MessageID()
		require.Equal(t, found, ok, text)
		if ok {
			require.Equal(t, testID, id, text)
		} else {
			require.Zero(t, id, text)
		}
	}
}

func TestErrIdentifyAndErrProtocolUnwrap(t *testing.T) {
	const reason = "E_BAD_BODY IDENTIFY heartbeat interval (999) is invalid"
	for _, err := range []error{ErrIdentify{reason}, ErrProtocol{reason}, fmt.Errorf("nsqd 127.0.0.1:4150: %w", ErrIdentify{reason})} {
		var pe *ProtocolError
		require.ErrorAs(t, err, &pe)
		require.Equal(t, "E_BAD_BODY", pe.Code)
		require.True(t, pe.Fatal())
	}
	for _, err := range []error{ErrIdentify{"EOF"}, ErrIdentify{}, ErrProtocol{"E_bad"}, ErrProtocol{}} {
		var pe *ProtocolError
		require.False(t, errors.As(err, &pe))
		require.True(t, errors.Unwrap(err) == nil)
	}
	require.True(t, error(ErrIdentify{"a"}) == error(ErrIdentify{"a"}), "comparable")
	require.ErrorIs(t, fmt.Errorf("x: %w", ErrProtocol{"a"}), ErrProtocol{"a"})
	require.Equal(t, `failed to IDENTIFY - E_X a\nb`, ErrIdentify{"E_X a\nb"}.Error())
}

func TestTimeoutError(t *testing.T) {
	err := fmt.Errorf("nsqd: %w", &TimeoutError{Step: "IDENTIFY"})
	var ne net.Error
	require.ErrorAs(t, err, &ne)
	require.True(t, ne.Timeout())
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NotErrorIs(t, err, os.ErrClosed)
	require.ErrorContains(t, err, "IDENTIFY")
}

func TestLookupdErrorText(t *testing.T) {
	require.EqualError(t, &LookupdError{Address: "http://l:4161/lookup", Status: 500, Message: "oops"}, "nsq: nsqlookupd http://l:4161/lookup: status 500: oops")
	require.EqualError(t, &LookupdError{Address: "http://l:4161/lookup", Err: errors.New("nsq: a\nb")}, `nsq: nsqlookupd http://l:4161/lookup: a\nb`)
	require.Less(t, len((&LookupdError{Err: errors.New(strings.Repeat("x", 1<<20))}).Error()), 600)
	require.ErrorIs(t, &LookupdError{Err: os.ErrClosed}, os.ErrClosed)
}

func FuzzParseProtocolError(f *testing.F) {
	for _, s := range []string{"", "E_INVALID", "E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight", "x\ny", "E_\xff", strings.Repeat("ä", 300)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		err := parseProtocolError(data)
		text := err.Error()
		require.True(t, utf8.ValidString(text))
		require.Equal(t, text, printable(text), "safe to log")
		require.LessOrEqual(t, len(text), 10*maxErrorText)
		require.True(t, strings.HasPrefix(string(data), err.Code))
		require.Regexp(t, `\A(E_[A-Z_]*)?\z`, err.Code)
		if id, ok := err.MessageID(); ok {
			require.False(t, err.Fatal())
			require.Contains(t, err.Desc, " "+string(id[:]))
		}
		var named MessageID // what nsqd says of a late answer names its message, whatever the ID is
		copy(named[:], data)
		if word := string(named[:]); printable(word) == word && !strings.ContainsAny(word, " ") {
			late := parseProtocolError([]byte("E_REQ_FAILED REQ " + word + " failed ID not in flight"))
			id, ok := late.MessageID()
			require.True(t, ok)
			require.Equal(t, named, id)
		}
		if err.Code != "" {
			var pe *ProtocolError
			require.ErrorAs(t, ErrIdentify{string(data)}, &pe)
			require.Equal(t, err, pe)
			if len(text) <= maxErrorText {
				require.Equal(t, *err, *parseProtocolError([]byte(text)), "round trip")
			}
		}
	})
}
