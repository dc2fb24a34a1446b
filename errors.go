package nsq

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Errors that programs written for go-nsq compare with ==, so they are returned as they are, never
// wrapped, and their text has no prefix.
var (
	// ErrNotConnected: the address is not one that is in use, or the producer has lost its connection.
	ErrNotConnected = errors.New("not connected")
	// ErrStopped: the consumer or producer was stopped.
	ErrStopped = errors.New("stopped")
	// ErrClosing: the connection is being closed.
	ErrClosing = errors.New("closing")
	// ErrAlreadyConnected: the address is connected, or being connected, already.
	ErrAlreadyConnected = errors.New("already connected")
	// ErrOverMaxInFlight: the RDY asked for does not fit into max-in-flight.
	ErrOverMaxInFlight = errors.New("over configure max-inflight")
)

// More texts that programs written for go-nsq know.
var (
	errConsumerStopped = errors.New("consumer stopped")
	errNoHandlers      = errors.New("no handlers")
	errMissingPort     = errors.New("missing port")
)

// Reasons why a connection ended, or never came about. They are wrapped with the address they are
// about: ask with errors.Is.
var (
	// ErrHeartbeatTimeout: nsqd sent not a byte for as long as a heartbeat may take, see Config.ReadTimeout.
	ErrHeartbeatTimeout = errors.New("nsq: heartbeat timeout: nsqd has fallen silent")
	// ErrConnectionLost: the connection to the nsqd that delivered the message is gone, and with it the right to answer.
	ErrConnectionLost = errors.New("nsq: connection lost")
	// ErrHTTPResponse: the address is that of a web server, such as nsqd's own HTTP port (4151 by
	// default, while TCP is 4150).
	ErrHTTPResponse = errors.New("nsq: unexpected HTTP response, a nsqd TCP endpoint is required")
	// ErrShortMessage: a message frame, or what was given to DecodeMessage, is shorter than the 26 bytes that stand
	// before a body.
	ErrShortMessage = errors.New("not enough data to decode valid message")
	// ErrTLSRefused: the config asks for TLS and nsqd has none. The library never goes on in clear text.
	ErrTLSRefused = errors.New("nsq: TLS was asked for (tls_v1), but nsqd does not offer it")
)

// Reasons why a message is not the handler's any more, beside ErrConnectionLost and ErrStopped.
var (
	// ErrMessageExpired: the message's timeout has passed, so nsqd gives it to somebody else.
	ErrMessageExpired = errors.New("nsq: message expired")
	// ErrMessageLost: nsqd said that the message is not this connection's any more.
	ErrMessageLost = errors.New("nsq: message lost: it is not in flight for this connection any more")
)

// ErrNotLookupd is behind the LookupdError of an address that answers in the protocol of nsqd's TCP
// port.
var ErrNotLookupd = errors.New("nsq: this looks like an nsqd TCP port; the HTTP port of an nsqlookupd is required (4161 by default)")

// errTopicNotFound is nsqlookupd's answer for a topic that nobody has published to yet. It is a good
// and empty answer.
var errTopicNotFound = errors.New("nsq: nsqlookupd does not know the topic")

// maxErrorText is how many bytes of a peer's text are kept in an error.
const maxErrorText = 512

// ProtocolError is an error frame from nsqd. Use errors.As to reach it.
type ProtocolError struct {
	Code string // for example "E_FIN_FAILED"; empty if nsqd's text has no code
	Desc string // the rest of the frame, for people; cut after 512 bytes, unprintable characters escaped
}

// Error returns nsqd's text: the code, a space and the description.
func (e *ProtocolError) Error() string {
	switch {
	case e.Code == "" && e.Desc == "":
		return "nsq: an error without a text from nsqd"
	case e.Code == "":
		return e.Desc
	case e.Desc == "":
		return e.Code
	}
	return e.Code + " " + e.Desc
}

// Fatal tells whether nsqd closes the connection after this error. It does after all of them but
// those about a single message: E_FIN_FAILED, E_REQ_FAILED and E_TOUCH_FAILED, which say that an answer
// came too late.
func (e *ProtocolError) Fatal() bool {
	switch e.Code {
	case "E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED":
		return false
	}
	return true
}

// MessageID returns the ID of the message that a late FIN, REQ or TOUCH was about, and false for other
// errors and if nsqd's text doesn't name it.
func (e *ProtocolError) MessageID() (MessageID, bool) {
	var id MessageID
	if e.Fatal() {
		return id, false
	}
	// FIN 0a1b2c3d4e5f6071 failed ID not in flight
	command, rest, _ := strings.Cut(e.Desc, " ")
	switch command {
	case "FIN", "REQ", "TOUCH":
	default:
		return id, false
	}
	word, _, _ := strings.Cut(rest, " ")
	if len(word) != len(id) {
		return id, false
	}
	copy(id[:], word)
	return id, true
}

// parseProtocolError reads the data of an error frame. Any bytes will do, and what comes of them can be
// logged: it is short and on one line.
func parseProtocolError(data []byte) *ProtocolError {
	text := cutText(string(data[:min(len(data), maxErrorText+utf8.UTFMax)]))
	n := codeLength(text)
	return &ProtocolError{
		Code: text[:n],
		Desc: printable(strings.TrimSpace(text[n:])),
	}
}

// codeLength is the length of the code that text starts with: a word of E_ and capital letters.
func codeLength(text string) int {
	if !strings.HasPrefix(text, "E_") {
		return 0
	}
	for i := 2; i < len(text); i++ {
		switch c := text[i]; {
		case 'A' <= c && c <= 'Z', c == '_':
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c >= utf8.RuneSelf:
			return 0 // a longer word, so not a code of nsqd's
		default:
			return i
		}
	}
	return len(text)
}

// protocolErrorOf is the error that a reason is about, or nil if it doesn't start with a code. The
// result is of type error, so that nil is nil.
func protocolErrorOf(reason string) error {
	if codeLength(reason) == 0 {
		return nil
	}
	return parseProtocolError([]byte(reason))
}

// ErrIdentify is the error of a refused or failed IDENTIFY. If it came from nsqd, errors.As finds a
// *ProtocolError with its code behind it.
type ErrIdentify struct {
	Reason string // nsqd's text as it came
}

// Error returns the reason behind a few words of context.
func (e ErrIdentify) Error() string {
	return "failed to IDENTIFY - " + printable(e.Reason)
}

// Unwrap returns the *ProtocolError that the reason is about, or nil if it is not from nsqd.
func (e ErrIdentify) Unwrap() error { return protocolErrorOf(e.Reason) }

// ErrProtocol is what a publish returns that nsqd refused. errors.As finds a *ProtocolError with nsqd's
// code behind it.
type ErrProtocol struct {
	Reason string // nsqd's text as it came
}

// Error returns the reason.
func (e ErrProtocol) Error() string { return printable(e.Reason) }

// Unwrap returns the *ProtocolError that the reason is about, or nil if it doesn't start with a code.
func (e ErrProtocol) Unwrap() error { return protocolErrorOf(e.Reason) }

// TooManyUnansweredError ends the connection to an nsqd that sends far more messages than RDY allows.
type TooManyUnansweredError struct {
	Unanswered int64 // messages that came and were neither answered nor expired
	MaxRDY     int64 // the highest RDY that was sent on the connection
}

func (e *TooManyUnansweredError) Error() string {
	return fmt.Sprintf("nsq: nsqd sends more than RDY allows: the connection holds %d messages, RDY was at most %d",
		e.Unanswered, e.MaxRDY)
}

// FrameSizeError is a size on the wire that can't be that of a frame. What follows it can't be
// understood, so the connection ends.
type FrameSizeError struct {
	Size int64 // as the peer announced it
	Max  int32 // the limit in force, see Config.MaxMsgSize; 0 if the size is wrong by itself

	text bool // the limit is that of a response or an error, 64 KiB
}

func (e *FrameSizeError) Error() string {
	switch {
	case e.Size < 0:
		return fmt.Sprintf("nsq: negative frame size %d", e.Size)
	case e.text:
		return fmt.Sprintf("nsq: frame size %d is over the limit of %d bytes for what is no message", e.Size, e.Max)
	case e.Max == 0:
		return fmt.Sprintf("nsq: frame size %d is too small to hold a frame type", e.Size)
	}
	return fmt.Sprintf("nsq: frame size %d is over the limit of %d bytes (max_msg_size)", e.Size, e.Max)
}

// UnexpectedFrameError is a frame of a type that the protocol doesn't have, or that has no place where it
// came. (FrameTypeError is the constant for nsqd's error frames.)
type UnexpectedFrameError struct {
	Type int32
}

func (e *UnexpectedFrameError) Error() string {
	return fmt.Sprintf("nsq: unexpected frame type %d", e.Type)
}

// UnexpectedAnswerError is an answer to a step of connecting that is none to it.
type UnexpectedAnswerError struct {
	Step   string // "SUB", "TLS", "snappy" or "deflate"
	Answer string // the beginning of it, quoted
}

func (e *UnexpectedAnswerError) Error() string {
	return fmt.Sprintf("nsq: unexpected answer %s to %s", e.Answer, e.Step)
}

// TimeoutError is a step of connecting that nsqd did not answer in time. It is a timeout for net.Error
// too, and errors.Is finds os.ErrDeadlineExceeded.
type TimeoutError struct {
	Step string // the command or what else was waited for: "IDENTIFY", "TLS", "AUTH", "SUB"
}

func (e *TimeoutError) Error() string {
	return "nsq: timeout waiting for nsqd's answer to " + e.Step
}

// Timeout is always true.
func (e *TimeoutError) Timeout() bool { return true }

// Temporary is always true: the next try may do better. It makes *TimeoutError a net.Error.
func (e *TimeoutError) Temporary() bool { return true }

// Is makes errors.Is find os.ErrDeadlineExceeded.
func (e *TimeoutError) Is(target error) bool { return target == os.ErrDeadlineExceeded }

// AddressError is an address that can't be one of an nsqd or nsqlookupd.
type AddressError struct {
	Address string // as it was given, but without a password or token
	Reason  string
}

func (e *AddressError) Error() string {
	return fmt.Sprintf("nsq: address %q: %s", e.Address, e.Reason)
}

// LookupdError is a query to an nsqlookupd that failed.
type LookupdError struct {
	Address string // the URL that was configured, completed; without user, password and tokens in the query
	Status  int    // of the HTTP answer, or of the envelope in it; 0 if there was no answer
	Message string // what nsqlookupd said about it, if it did; cut, unprintable characters escaped
	Err     error  // what went wrong besides, or nil
}

func (e *LookupdError) Error() string {
	var b strings.Builder
	b.WriteString("nsq: nsqlookupd ")
	b.WriteString(printable(e.Address))
	if e.Status != 0 {
		fmt.Fprintf(&b, ": status %d", e.Status)
	}
	if e.Message != "" {
		b.WriteString(": ")
		b.WriteString(e.Message)
	}
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(printable(cutText(strings.TrimPrefix(e.Err.Error(), "nsq: "))))
	}
	return b.String()
}

// Unwrap returns Err.
func (e *LookupdError) Unwrap() error { return e.Err }

// counted is a number of things in words.
func counted(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// cutText shortens a peer's text to maxErrorText bytes, at the end of a character.
func cutText(s string) string {
	if len(s) <= maxErrorText {
		return s
	}
	n := maxErrorText
	for n > maxErrorText-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// printable makes a peer's text safe for a log line: control characters, line ends, marks that turn
// the direction of writing, and bytes that are no UTF-8 are written as Go escapes.
func printable(s string) string {
	clean := true
	for i, r := range s {
		if !strconv.IsPrint(r) || r == utf8.RuneError && isBadByte(s[i:]) {
			clean = false
			break
		}
	}
	if clean {
		return s
	}
	b := make([]byte, 0, len(s)+16)
	for i, r := range s {
		switch {
		case r == utf8.RuneError && isBadByte(s[i:]):
			const hex = "0123456789abcdef"
			b = append(b, '\\', 'x', hex[s[i]>>4], hex[s[i]&15])
		case strconv.IsPrint(r):
			b = utf8.AppendRune(b, r)
		default:
			q := strconv.QuoteRune(r)
			b = append(b, q[1:len(q)-1]...)
		}
	}
	return string(b)
}

// isBadByte tells whether s starts with a byte that belongs to no character.
func isBadByte(s string) bool {
	_, n := utf8.DecodeRuneInString(s)
	return n == 1
}
