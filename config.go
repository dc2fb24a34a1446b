package nsq

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Config holds every option of a [Consumer], a [Producer] and a [Conn].
//
// Make one with [NewConfig], which fills in the defaults; a nil Config or a literal one is refused with an error.
// Change it by assigning fields or with [Config.Set], then pass it on: [NewConsumer] and [NewProducer] call
// [Config.Validate] and keep a copy, so that changes made afterwards have no effect. (One exception, kept from go-nsq:
// the built-in backoff strategies read BackoffMultiplier from the Config they were set on.)
//
// A Config may be shared by any number of consumers. It has no lock: don't change it while another goroutine uses it.
//
// The struct tags are the only list of options. They are, in the terms of the field:
//
//   - opt: the name of the option, for Set; a dash is as good as an underscore
//   - default: what NewConfig sets; none means the zero value
//   - min and max: the range that Set and Validate accept, ends included; none means what the type holds
//   - off: one value outside the range that is accepted too, and switches the thing off
//   - inverted: the option says the opposite of its (bool) field
//   - secret: the value is kept out of errors
//
// Durations are a [time.Duration]; a bare integer given to Set is milliseconds. nsqd takes whole milliseconds in
// IDENTIFY, see <https://nsq.io/clients/tcp_protocol_spec.html#identify>.
type Config struct {
	// DialTimeout bounds the TCP dial of one nsqd. Default 1s; zero leaves it to the operating system (minutes).
	DialTimeout time.Duration `opt:"dial_timeout" min:"0" default:"1s"`

	// Dial, if set, opens the connections to nsqd in place of a [net.Dialer]: for proxies, tunnels and tests. network and
	// addr tell which nsqd, as it was configured or discovered; ctx ends after DialTimeout and when the consumer is
	// stopped. LocalAddr is not applied. It may be called from several goroutines at once.
	// Default nil. Set takes a func of exactly this type.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error) `opt:"dial"`

	// ReadTimeout is the longest silence accepted from an nsqd; after it the connection counts as dead. It also bounds the
	// wait for each answer of the handshake. HeartbeatInterval must not be above it. Default 60s, from 100ms to 5m.
	// Zero means none: silence is then limited by missing heartbeats alone (none for two intervals), and an answer of the
	// handshake may take 60s.
	ReadTimeout time.Duration `opt:"read_timeout" off:"0" min:"100ms" max:"5m" default:"60s"`

	// WriteTimeout is the longest time a write to an nsqd may take; after it the connection counts as dead.
	// Default 10s, from 100ms to 5m. Zero means no limit.
	WriteTimeout time.Duration `opt:"write_timeout" off:"0" min:"100ms" max:"5m" default:"10s"`

	// LocalAddr is the local end of connections to nsqd. Default nil: chosen by the operating system. Set takes a
	// [net.Addr] or the text host:port (port 0 for any); a host name in it is looked up right then, which may block.
	LocalAddr net.Addr `opt:"local_addr"`

	// ReconnectInterval is the ceiling of the delay before the first try to reconnect to a lost nsqd; the delay itself is
	// random below it, so that consumers don't come back all at once. It doubles with each failed try, up to
	// MaxReconnectInterval. Default 250ms, from 1ms to 5m.
	ReconnectInterval time.Duration `opt:"reconnect_interval" min:"1ms" max:"5m" default:"250ms"`

	// MaxReconnectInterval is the largest ceiling of the delay between two tries to reconnect. Default 15s, from 1ms
	// to 60m, and not below ReconnectInterval.
	MaxReconnectInterval time.Duration `opt:"max_reconnect_interval" min:"1ms" max:"60m" default:"15s"`

	// LookupdPollInterval is the time between two rounds of asking the nsqlookupds. Default 60s, from 10ms to 5m.
	LookupdPollInterval time.Duration `opt:"lookupd_poll_interval" min:"10ms" max:"5m" default:"60s"`

	// LookupdPollJitter spreads the polls of many consumers: the first repeat comes a random part of
	// LookupdPollJitter × LookupdPollInterval later. A fraction from 0 (none) to 1, default 0.3.
	LookupdPollJitter float64 `opt:"lookupd_poll_jitter" min:"0" max:"1" default:"0.3"`

	// LookupdPollTimeout bounds one HTTP request to one nsqlookupd, from the dial to the end of the body. Default 1m;
	// zero means no limit. An http.Client given to SetLookupdHttpClient may bring its own.
	LookupdPollTimeout time.Duration `opt:"lookupd_poll_timeout" min:"0" default:"1m"`

	// VanishTimeout is how long a discovered nsqd that no nsqlookupd lists any more keeps its connection. It is closed
	// when it was missing from three good polls in a row, for at least this long, and no message came from it meanwhile.
	// Default 60s, because an nsqlookupd knows nobody for a while after its restart. Zero leaves the other conditions.
	VanishTimeout time.Duration `opt:"vanish_timeout" min:"0" default:"60s"`

	// MaxRequeueDelay caps the delay that is computed for a failed message, see DefaultRequeueDelay. Default 15m, from 0
	// to 60m; zero requeues at once. nsqd has a maximum of its own (max-req-timeout, 1h).
	MaxRequeueDelay time.Duration `opt:"max_requeue_delay" min:"0" max:"60m" default:"15m"`

	// DefaultRequeueDelay times the attempts of a message is the delay of its REQ when the handler failed or called
	// Requeue(-1). Default 90s, from 0 to 60m; zero requeues at once.
	DefaultRequeueDelay time.Duration `opt:"default_requeue_delay" min:"0" max:"60m" default:"90s"`

	// BackoffStrategy gives the length of each pause in backoff. Default, and for nil: *[ExponentialStrategy].
	// Set takes "exponential" (or ""), "full_jitter" or a BackoffStrategy. It may be shared by consumers, which then call
	// it concurrently.
	BackoffStrategy BackoffStrategy `opt:"backoff_strategy" default:"exponential"`

	// MaxBackoffDuration is the longest pause of backoff: the level rises only while the strategy stays within it.
	// Default 2m, from 0 to 60m; zero switches backoff off, and failed messages then never lower RDY.
	MaxBackoffDuration time.Duration `opt:"max_backoff_duration" min:"0" max:"60m" default:"2m"`

	// BackoffMultiplier is the unit of the built-in strategies: the pause at level n is BackoffMultiplier × 2ⁿ.
	// Default 1s, from 0 to 60m; zero makes every pause empty.
	BackoffMultiplier time.Duration `opt:"backoff_multiplier" min:"0" max:"60m" default:"1s"`

	// MaxAttempts is how often a message is tried: one that arrives with more attempts is given up (FIN) without
	// reaching the handler. nsqd counts deliveries, also those that timed out or were sent back at Stop. Default 5;
	// zero means no limit.
	MaxAttempts uint16 `opt:"max_attempts" min:"0" max:"65535" default:"5"`

	// LowRdyIdleTimeout is go-nsq's name for RDYTurnIdle, and is used in its place when only this one was changed.
	// Default 10s (without effect), from 1s to 5m.
	LowRdyIdleTimeout time.Duration `opt:"low_rdy_idle_timeout" min:"1s" max:"5m" default:"10s"`

	// LowRdyTimeout is go-nsq's name for RDYTurnBusy, and is used in its place when only this one was changed.
	// Default 30s (without effect), from 1s to 5m.
	LowRdyTimeout time.Duration `opt:"low_rdy_timeout" min:"1s" max:"5m" default:"30s"`

	// RDYTurnIdle is how long a connection keeps its RDY of 1 without sending a message while others wait for a turn,
	// when there are more connections than MaxInFlight. Default 500ms, from 10ms to 5m. See also LowRdyIdleTimeout.
	RDYTurnIdle time.Duration `opt:"rdy_turn_idle" min:"10ms" max:"5m" default:"500ms"`

	// RDYTurnBusy is how long a connection that does send messages keeps its RDY of 1 while others wait for a turn,
	// when there are more connections than MaxInFlight. Default 2s, from 10ms to 5m. See also LowRdyTimeout.
	RDYTurnBusy time.Duration `opt:"rdy_turn_busy" min:"10ms" max:"5m" default:"2s"`

	// RDYRedistributeInterval is the period in which max-in-flight is shared out anew, by what connections make of it.
	// Default 5s, from 1ms to 5s.
	RDYRedistributeInterval time.Duration `opt:"rdy_redistribute_interval" min:"1ms" max:"5s" default:"5s"`

	// ClientID names this client in nsqd's statistics (IDENTIFY client_id and short_id). Default: the host name up to its
	// first dot. Empty: nsqd takes the peer's address.
	ClientID string `opt:"client_id"`

	// Hostname is the host this client runs on, for nsqd's statistics (IDENTIFY hostname and long_id). Default: the host
	// name. Empty: nsqd takes the peer's address.
	Hostname string `opt:"hostname"`

	// UserAgent names the program and its version (IDENTIFY user_agent). Default: this library and [VERSION].
	UserAgent string `opt:"user_agent"`

	// TopologyRegion is where this client runs (IDENTIFY topology_region). An nsqd with the experiment
	// topology-aware-consumption prefers consumers of its own zone, then of its own region. Default empty: unknown.
	TopologyRegion string `opt:"topology_region"`

	// TopologyZone is the part of TopologyRegion this client runs in (IDENTIFY topology_zone). Default empty: unknown.
	TopologyZone string `opt:"topology_zone"`

	// HeartbeatInterval is the time between nsqd's heartbeats (IDENTIFY heartbeat_interval), which the library answers.
	// Default 30s, and not above ReadTimeout. nsqd takes from 1s to its max-heartbeat-interval, 60s unless changed, and
	// refuses the connection otherwise; only nsqd knows its limits, so that Validate leaves them to it. Zero means
	// nsqd's default. Exactly -1ns switches heartbeats off, and with them the limit on silence; nsqd then refuses SUB, so
	// it is for producers. For Set, off is "-1ns", time.Duration(-1) or the integer -1.
	HeartbeatInterval time.Duration `opt:"heartbeat_interval" off:"-1ns" min:"0" default:"30s"`

	// SampleRate is the percentage of messages to receive (IDENTIFY sample_rate), 1 to 99; the rest is dropped for
	// this channel, not left for other consumers. Default zero: all messages.
	SampleRate int32 `opt:"sample_rate" min:"0" max:"99"`

	// TlsV1 asks for TLS (IDENTIFY tls_v1). An nsqd that has none is then not connected to. Default false: clear text,
	// whatever the other TLS options say.
	TlsV1 bool `opt:"tls_v1"`

	// TlsConfig is used for TLS. Default nil, which verifies the nsqd against the system's CAs. Where ServerName is empty
	// the host of the address is verified. The options tls_root_ca_file, tls_cert, tls_key, tls_insecure_skip_verify and
	// tls_min_version change a copy of it and put that here. Set takes a *tls.Config.
	TlsConfig *tls.Config `opt:"tls_config"`

	// Deflate asks for DEFLATE compression (IDENTIFY deflate). Not together with Snappy. An nsqd that has none is used
	// without. Default false.
	Deflate bool `opt:"deflate"`

	// DeflateLevel is the effort of DEFLATE on both ends (IDENTIFY deflate_level), from 1 (fast) to 9 (small). nsqd
	// lowers it to its own maximum, 6 unless changed. Default 6.
	DeflateLevel int `opt:"deflate_level" min:"1" max:"9" default:"6"`

	// Snappy asks for Snappy compression (IDENTIFY snappy). Not together with Deflate. An nsqd that has none is used
	// without. Default false.
	Snappy bool `opt:"snappy"`

	// OutputBufferSize is the size of nsqd's write buffer for this connection in bytes (IDENTIFY output_buffer_size).
	// nsqd takes 64 to 65536 unless changed. Default 16384. Zero means nsqd's default; -1 switches the buffer off, so that
	// nsqd sends each message at once.
	OutputBufferSize int64 `opt:"output_buffer_size" off:"-1" min:"0" default:"16384"`

	// OutputBufferTimeout is how long nsqd may keep messages in that buffer (IDENTIFY output_buffer_timeout). nsqd takes
	// 25ms to 30s unless changed. Default 250ms. Zero means nsqd's default. Exactly -1ns switches the timeout off; for
	// Set that is "-1ns", time.Duration(-1) or the integer -1.
	OutputBufferTimeout time.Duration `opt:"output_buffer_timeout" off:"-1ns" min:"0" default:"250ms"`

	// MaxInFlight is how many unanswered messages nsqds may leave with this consumer, over all connections. It bounds the
	// memory they take, and should be at least the number of handlers. Default 1. Zero pauses the consumer until
	// ChangeMaxInFlight.
	MaxInFlight int `opt:"max_in_flight" min:"0" default:"1"`

	// MsgTimeout is the time nsqd waits for an answer to a message before it delivers it again (IDENTIFY msg_timeout).
	// nsqd takes from 1s to its max-msg-timeout, 15m unless changed. Default zero: nsqd's default, 60s unless changed.
	MsgTimeout time.Duration `opt:"msg_timeout" min:"0"`

	// MaxMsgSize is the largest frame accepted from nsqd in bytes, its 4 bytes of type included; a larger one ends the
	// connection. Default zero: a bound of 128 MiB.
	MaxMsgSize int32 `opt:"max_msg_size" min:"0"`

	// AuthSecret is sent to an nsqd that requires AUTH, and as bearer token to nsqlookupds (see LookupdAuthorization).
	// It never appears in logs or errors, nor where the Config is printed. Default empty: none.
	AuthSecret string `opt:"auth_secret" secret:"true"`

	// LookupdAuthorization sends AuthSecret to the nsqlookupds in an Authorization header. Default true. The option says
	// the opposite, and is taken at its word: Set("skip_lookupd_authorization", true) makes this field false.
	LookupdAuthorization bool `opt:"skip_lookupd_authorization" inverted:"true" default:"true"`

	// ShutdownTimeout is how long Stop waits for running handlers to finish; what is left then goes back to nsqd by the
	// message timeout. Default 30s, from 0 to 60m; zero does not wait. Shutdown takes its deadline from a context instead.
	ShutdownTimeout time.Duration `opt:"shutdown_timeout" min:"0" max:"60m" default:"30s"`

	// All plain values, so that a Config may be copied by assignment.

	created  bool   // by NewConfig
	explicit uint64 // bit i: options()[i] was given to Set

	tlsCertFile, tlsKeyFile string // halves of a client certificate, as given to Set
	tlsPairLoaded           bool   // they belong together, and are in TlsConfig
}

// NewConfig returns a Config with the default of every option. It is the only way to make one.
func NewConfig() *Config {
	c := &Config{created: true}
	for i := range options() {
		o := &options()[i]
		if o.initial.IsValid() {
			o.in(c).Set(o.initial)
		}
	}
	c.BackoffStrategy = newExponential(c)
	if host, err := os.Hostname(); err == nil { // else nsqd shows the address, which is no reason to fail
		c.Hostname = host
		c.ClientID, _, _ = strings.Cut(host, ".")
	}
	c.UserAgent = "rdyloop-nsq/" + VERSION
	return c
}

// Set changes the option with that name, where a dash is as good as an underscore ("max-in-flight"). The value is of the
// field's type or can be converted to it without loss:
//
//   - durations: a [time.Duration], text such as "1m30s", or an integer in milliseconds (but no int8 or uint8, as in
//     go-nsq, and no integer type with a name of its own, which could mean anything)
//   - integers: any integer but a time.Duration, or text
//   - floats: any float or integer, or text
//   - bools: a bool, text as strconv.ParseBool takes it, or an integer, where all but zero is true
//   - strings: text, bytes, numbers, bools and what has a String or Error method
//   - local_addr, backoff_strategy: see the fields
//   - funcs and pointers: the exact type
//
// Five options have no field of their own. They change TlsConfig, or rather put a changed copy in its place; if there is
// none, a new one that takes TLS 1.2 or later:
//
//   - tls_root_ca_file: path of a PEM file with the CAs that sign for the nsqds
//   - tls_cert, tls_key: paths of the PEM files of a client certificate, in any order; read when both are known
//   - tls_insecure_skip_verify: a bool; true accepts any nsqd
//   - tls_min_version: "ssl3.0", "tls1.0", "tls1.1", "tls1.2", "tls1.3" or a constant of crypto/tls
//
// Any error is an *[OptionError], and the Config is then as it was before. nil is never a value: to clear a field, assign
// to it. Rules between options are left to [Config.Validate], so that the order of Sets does not matter.
func (c *Config) Set(option string, value any) error {
	if err := c.checkCreated(); err != nil {
		return err
	}
	name := strings.ReplaceAll(option, "-", "_")
	if set, ok := tlsOptions[name]; ok {
		if err := set(c, value); err != nil {
			return coerceError(name, value, err)
		}
		return nil
	}
	o := optionNamed(name)
	if o == nil {
		// Without the value: it might be a secret whose option was misspelled.
		return &OptionError{Option: name, Reason: "no such option", kind: optionUnknown}
	}
	return o.set(c, value)
}

// Validate returns nil if the Config can be used. Otherwise the error tells all problems, one a line and each an
// *[OptionError] that names the field, the value and the limit; a single problem is returned as it is. [NewConsumer] and
// [NewProducer] call it. Limits that belong to an nsqd are checked by that nsqd only, when a connection is made.
func (c *Config) Validate() error {
	if err := c.checkCreated(); err != nil {
		return err
	}
	var errs []error
	for i := range options() {
		o := &options()[i]
		field := o.in(c)
		if reason := o.outside(o.wide(field)); reason != "" {
			errs = append(errs, &OptionError{Option: o.field, Value: field.Interface(), Reason: reason})
		}
	}
	errs = append(errs, c.contradictions()...)
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// contradictions finds what is wrong between options that are right by themselves.
func (c *Config) contradictions() (errs []error) {
	if c.ReadTimeout != 0 && c.HeartbeatInterval > c.ReadTimeout {
		errs = append(errs, &OptionError{Option: "HeartbeatInterval", Value: c.HeartbeatInterval,
			Reason: fmt.Sprintf("must be less than ReadTimeout %v", c.ReadTimeout), kind: optionContradicts})
	}
	if c.MaxReconnectInterval < c.ReconnectInterval {
		errs = append(errs, &OptionError{Option: "MaxReconnectInterval", Value: c.MaxReconnectInterval,
			Reason: fmt.Sprintf("must not be less than ReconnectInterval %v", c.ReconnectInterval), kind: optionContradicts})
	}
	if c.Snappy && c.Deflate {
		errs = append(errs, &OptionError{Option: "Snappy", Value: true,
			Reason: "excludes Deflate true", kind: optionContradicts})
	}
	if t := c.TlsConfig; t != nil && t.MaxVersion != 0 && t.MinVersion > t.MaxVersion {
		errs = append(errs, &OptionError{Option: "TlsConfig.MinVersion", Value: tls.VersionName(t.MinVersion),
			Reason: "must not be above MaxVersion " + tls.VersionName(t.MaxVersion), kind: optionContradicts})
	}
	switch {
	case c.tlsCertFile != "" && c.tlsKeyFile == "":
		errs = append(errs, &OptionError{Option: "tls_cert", Value: c.tlsCertFile,
			Reason: "needs tls_key", kind: optionContradicts})
	case c.tlsCertFile == "" && c.tlsKeyFile != "":
		errs = append(errs, &OptionError{Option: "tls_key", Value: c.tlsKeyFile,
			Reason: "needs tls_cert", kind: optionContradicts})
	}
	return errs
}

func (c *Config) checkCreated() error {
	if c == nil || !c.created {
		return &OptionError{Reason: "Config{} must be created with NewConfig()", kind: optionNotCreated}
	}
	return nil
}

// clone returns a copy that later changes to c, or to its TlsConfig, cannot reach. A built-in backoff strategy goes on to
// read the multiplier from the Config it was set on; one that was set on none reads it from the copy.
func (c *Config) clone() *Config {
	clone := *c
	clone.TlsConfig = c.TlsConfig.Clone() // nil stays nil
	clone.BackoffStrategy = strategyFor(c.BackoffStrategy, &clone)
	return &clone
}

// backoffStrategy returns the strategy in effect, never nil.
func (c *Config) backoffStrategy() BackoffStrategy { return strategyFor(c.BackoffStrategy, c) }

// turnIdle is how long a connection keeps RDY 1 when it sends nothing and others wait.
func (c *Config) turnIdle() time.Duration {
	if !c.chosen("rdy_turn_idle") && c.chosen("low_rdy_idle_timeout") {
		return c.LowRdyIdleTimeout
	}
	return c.RDYTurnIdle
}

// turnBusy is how long a connection keeps RDY 1 when it is busy and others wait.
func (c *Config) turnBusy() time.Duration {
	if !c.chosen("rdy_turn_busy") && c.chosen("low_rdy_timeout") {
		return c.LowRdyTimeout
	}
	return c.RDYTurnBusy
}

// chosen reports whether somebody asked for the value of an option: by Set, even if to its default, or by assigning
// another value to the field.
func (c *Config) chosen(name string) bool {
	o := optionNamed(name)
	return c.explicit&(1<<o.index) != 0 || !o.in(c).Equal(o.initial)
}

// An option is what a field's struct tag says.
type option struct {
	name          string // for Set
	field         string
	typ           reflect.Type
	def, min, max string // as in the tag; "" if there is none
	off           string // likewise: a value outside min and max that is allowed
	inverted      bool   // the option is the opposite of the field
	secret        bool   // keep the value out of errors

	index   int           // in options()
	path    []int         // of the field in Config
	initial reflect.Value // def, of the field's type; invalid if there is none

	// Of the wide type, see wide; invalid if there is none. Integers always have lo and hi: those of their type.
	lo, hi, disabled reflect.Value
}

// options returns all options that have a field, in the order of the fields. Callers must not change it.
var options = sync.OnceValue(func() []option {
	var all []option
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if f.Tag.Get("opt") == "" {
			continue
		}
		o := newOption(f)
		o.index = len(all)
		all = append(all, o)
	}
	return all
})

// newOption reads a struct tag. It panics if the tag contradicts its field's type, which the first test run shows.
func newOption(f reflect.StructField) option {
	o := option{
		name: f.Tag.Get("opt"), field: f.Name, typ: f.Type, path: f.Index,
		def: f.Tag.Get("default"), min: f.Tag.Get("min"), max: f.Tag.Get("max"), off: f.Tag.Get("off"),
		inverted: f.Tag.Get("inverted") == "true", secret: f.Tag.Get("secret") == "true",
	}
	parse := func(text string) reflect.Value {
		if text == "" {
			return reflect.Value{}
		}
		v, err := o.convert(text)
		if err != nil {
			panic(fmt.Sprintf("nsq: tag of Config.%s: %v", f.Name, err))
		}
		return reflect.ValueOf(v)
	}
	o.disabled, o.lo, o.hi = parse(o.off), parse(o.min), parse(o.max)
	o.initial = parse(o.def)
	switch {
	case o.initial.IsValid():
		o.initial = o.initial.Convert(o.typ)
	case o.typ.Comparable() && o.typ.Kind() != reflect.Interface:
		o.initial = reflect.Zero(o.typ)
	}
	if o.isInteger() {
		lo, hi := integerLimits(o.typ)
		if !o.lo.IsValid() {
			o.lo = reflect.ValueOf(lo)
		}
		if !o.hi.IsValid() {
			o.hi = reflect.ValueOf(hi)
		}
	}
	return o
}

// optionNamed returns the option with that name (underscores), or nil.
func optionNamed(name string) *option {
	i := slices.IndexFunc(options(), func(o option) bool { return o.name == name })
	if i < 0 {
		return nil
	}
	return &options()[i]
}

// in returns the option's field in c.
func (o *option) in(c *Config) reflect.Value { return reflect.ValueOf(c).Elem().FieldByIndex(o.path) }

// set converts the value, checks its range and stores it.
func (o *option) set(c *Config, value any) error {
	shown := value
	if o.secret {
		shown = "(hidden)"
	}
	converted, err := o.convert(value)
	if err != nil {
		return coerceError(o.name, shown, err)
	}
	v := reflect.ValueOf(converted)
	if reason := o.outside(v); reason != "" {
		// The converted value, because 3 may have meant 3ms.
		return &OptionError{Option: o.name, Value: converted, Reason: reason}
	}
	switch converted := converted.(type) {
	case bool:
		v = reflect.ValueOf(converted != o.inverted)
	case BackoffStrategy:
		v = reflect.ValueOf(bindStrategy(converted, c))
	}
	o.in(c).Set(v.Convert(o.typ))
	c.explicit |= 1 << o.index
	return nil
}

// wide returns a field's value in the type that convert returns: int64 for all integers, so that a value too large for
// the field can still be compared with the limits, and told in the error.
func (o *option) wide(field reflect.Value) reflect.Value {
	switch {
	case !o.isInteger():
		return field
	case field.CanUint():
		return reflect.ValueOf(int64(field.Uint()))
	default:
		return reflect.ValueOf(field.Int())
	}
}

// outside tells what is wrong with a wide value: "" for nothing, else "< min" or "> max".
func (o *option) outside(v reflect.Value) string {
	switch {
	case o.disabled.IsValid() && v.Equal(o.disabled):
		return ""
	case v.CanFloat() && math.IsNaN(v.Float()): // which no comparison would find
		return "is not a number"
	case o.lo.IsValid() && compareNumbers(v, o.lo) < 0:
		return fmt.Sprintf("< %v", o.lo)
	case o.hi.IsValid() && compareNumbers(v, o.hi) > 0:
		return fmt.Sprintf("> %v", o.hi)
	}
	return ""
}

func compareNumbers(a, b reflect.Value) int {
	if a.CanFloat() {
		return cmp.Compare(a.Float(), b.Float())
	}
	return cmp.Compare(a.Int(), b.Int())
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	addrType     = reflect.TypeFor[net.Addr]()
	strategyType = reflect.TypeFor[BackoffStrategy]()
)

// isInteger reports whether the field is an integer and no duration.
func (o *option) isInteger() bool {
	v := reflect.Zero(o.typ)
	return o.typ != durationType && (v.CanInt() || v.CanUint())
}

// integerLimits returns the range of an integer type, as far as an int64 can tell it. int has 32 bits on some machines.
func integerLimits(t reflect.Type) (lo, hi int64) {
	if reflect.Zero(t).CanUint() {
		return 0, int64(min(math.MaxUint64>>(64-t.Bits()), uint64(math.MaxInt64)))
	}
	return math.MinInt64 >> (64 - t.Bits()), math.MaxInt64 >> (64 - t.Bits())
}

// convert returns the value as bool, int64, float64, string, time.Duration or, for all other fields, in a type that can be
// assigned to the field.
func (o *option) convert(value any) (any, error) {
	if isNil(value) {
		return nil, errors.New("nil is not a value")
	}
	switch o.typ {
	case durationType:
		return toDuration(value, o.disabled)
	case addrType:
		return toAddr(value)
	case strategyType:
		return toStrategy(value)
	}
	switch {
	case o.isInteger():
		return toInt(value)
	case o.typ.Kind() == reflect.Bool:
		return toBool(value)
	case o.typ.Kind() == reflect.Float64:
		return toFloat(value)
	case o.typ.Kind() == reflect.String:
		return toString(value)
	case !reflect.TypeOf(value).AssignableTo(o.typ):
		return nil, fmt.Errorf("invalid value type %T, want %v", value, o.typ)
	}
	return value, nil
}

func isNil(value any) bool {
	switch v := reflect.ValueOf(value); v.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Chan, reflect.Func, reflect.Map, reflect.Pointer, reflect.Slice, reflect.UnsafePointer:
		return v.IsNil()
	default:
		return false
	}
}

func invalidType(value any) error { return fmt.Errorf("invalid value type %T", value) }

// asText returns the text in a string, or in a type made from one such as json.Number.
func asText(value any) (text string, ok bool) {
	v := reflect.ValueOf(value)
	if v.Kind() != reflect.String {
		return "", false
	}
	return v.String(), true
}

// toDuration takes an integer as milliseconds; only the one that stands for off, -1 or 0, is taken as it is.
func toDuration(value any, off reflect.Value) (any, error) {
	if d, ok := value.(time.Duration); ok {
		return d, nil
	}
	if text, ok := asText(value); ok {
		return time.ParseDuration(text)
	}
	switch value.(type) {
	case int, int16, int32, int64, uint, uint16, uint32, uint64:
	default:
		return nil, invalidType(value)
	}
	n, err := integer(value)
	if err != nil {
		return nil, err
	}
	if off.IsValid() && n == off.Int() {
		return time.Duration(n), nil
	}
	if limit := int64(math.MaxInt64 / time.Millisecond); n > limit || n < -limit {
		return nil, errors.New("too many milliseconds for a duration")
	}
	return time.Duration(n) * time.Millisecond, nil
}

func toInt(value any) (any, error) {
	if text, ok := asText(value); ok {
		return strconv.ParseInt(text, 10, 64)
	}
	return integer(value)
}

func toFloat(value any) (any, error) {
	var f float64
	if text, ok := asText(value); ok {
		var err error
		if f, err = strconv.ParseFloat(text, 64); err != nil {
			return nil, err
		}
	} else if v := reflect.ValueOf(value); v.CanFloat() {
		f = v.Float()
	} else {
		n, err := integer(value)
		if err != nil {
			return nil, err
		}
		f = float64(n)
	}
	return f, nil
}

func toBool(value any) (any, error) {
	if text, ok := asText(value); ok {
		return strconv.ParseBool(text)
	}
	switch v := reflect.ValueOf(value); {
	case v.Kind() == reflect.Bool:
		return v.Bool(), nil
	case v.CanUint():
		return v.Uint() != 0, nil
	default:
		n, err := integer(value)
		return n != 0, err
	}
}

// integer returns the value of any integer, but not of a duration: a number of nanoseconds is no count.
func integer(value any) (int64, error) {
	switch v := reflect.ValueOf(value); {
	case v.Type() == durationType:
		return 0, invalidType(value)
	case v.CanInt():
		return v.Int(), nil
	case v.CanUint() && v.Uint() > math.MaxInt64:
		return 0, strconv.ErrRange
	case v.CanUint():
		return int64(v.Uint()), nil
	default:
		return 0, invalidType(value)
	}
}

// toString takes what is text or has one obvious text. A struct or a func as a name is a mistake.
func toString(value any) (any, error) {
	switch value := value.(type) {
	case []byte:
		return string(value), nil
	case fmt.Stringer, error:
		return fmt.Sprint(value), nil
	}
	if text, ok := asText(value); ok {
		return text, nil
	}
	switch v := reflect.ValueOf(value); {
	case v.CanFloat():
		return fmt.Sprintf("%f", v.Float()), nil
	case v.CanInt(), v.CanUint(), v.Kind() == reflect.Bool:
		return fmt.Sprint(value), nil
	default:
		return nil, invalidType(value)
	}
}

func toAddr(value any) (any, error) {
	if addr, ok := value.(net.Addr); ok {
		return addr, nil
	}
	text, ok := asText(value)
	if !ok {
		return nil, invalidType(value)
	}
	return net.ResolveTCPAddr("tcp", text)
}

func toStrategy(value any) (any, error) {
	if s, ok := value.(BackoffStrategy); ok {
		return s, nil
	}
	switch text, ok := asText(value); {
	case !ok:
		return nil, invalidType(value)
	case text == "", text == "exponential":
		return &ExponentialStrategy{}, nil
	case text == "full_jitter":
		return &FullJitterStrategy{}, nil
	default:
		return nil, errors.New("want exponential or full_jitter")
	}
}

// tlsOptions are the options without a field of their own.
var tlsOptions = map[string]func(c *Config, value any) error{
	"tls_root_ca_file":         (*Config).setRootCAFile,
	"tls_cert":                 (*Config).setCertFile,
	"tls_key":                  (*Config).setKeyFile,
	"tls_insecure_skip_verify": (*Config).setInsecureSkipVerify,
	"tls_min_version":          (*Config).setMinVersion,
}

// changeTLS puts a changed copy in TlsConfig's place. The one that is there may be the user's, and in use.
func (c *Config) changeTLS(change func(*tls.Config)) {
	t := c.TlsConfig.Clone()
	if t == nil {
		t = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	change(t)
	c.TlsConfig = t
}

func (c *Config) setRootCAFile(value any) error {
	path, err := toPath(value)
	if err != nil {
		return err
	}
	pem, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("failed to read custom Certificate Authority file %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return errors.New("failed to append certificates from Certificate Authority file")
	}
	c.changeTLS(func(t *tls.Config) { t.RootCAs = pool })
	return nil
}

func (c *Config) setCertFile(value any) error {
	path, err := toPath(value)
	if err != nil {
		return err
	}
	return c.setClientCert(path, c.tlsKeyFile, path, "")
}

func (c *Config) setKeyFile(value any) error {
	path, err := toPath(value)
	if err != nil {
		return err
	}
	return c.setClientCert(c.tlsCertFile, path, "", path)
}

// setClientCert loads a client certificate once both halves are known. newCert and newKey tell which half is new: if
// the other one is part of a loaded pair and does not match, the new half is taken as the first of another pair, as when
// flags replace what a file had set. Validate makes sure that its second half follows. An empty path takes a half back.
func (c *Config) setClientCert(cert, key, newCert, newKey string) error {
	loaded := false
	if cert != "" && key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		switch {
		case err == nil:
			c.changeTLS(func(t *tls.Config) { t.Certificates = []tls.Certificate{pair} })
			loaded = true
		case c.tlsPairLoaded && !isPathError(err):
			cert, key = newCert, newKey
		default:
			return err
		}
	}
	c.tlsCertFile, c.tlsKeyFile, c.tlsPairLoaded = cert, key, loaded
	return nil
}

func isPathError(err error) bool {
	var pathErr *fs.PathError
	return errors.As(err, &pathErr)
}

func (c *Config) setInsecureSkipVerify(value any) error {
	if isNil(value) {
		return invalidType(value)
	}
	skip, err := toBool(value)
	if err != nil {
		return err
	}
	c.changeTLS(func(t *tls.Config) { t.InsecureSkipVerify = skip.(bool) })
	return nil
}

var tlsVersions = map[string]uint16{
	"ssl3.0": 0x0300, // whose constant is deprecated. No harm: crypto/tls starts at TLS 1.0 anyway
	"tls1.0": tls.VersionTLS10,
	"tls1.1": tls.VersionTLS11,
	"tls1.2": tls.VersionTLS12,
	"tls1.3": tls.VersionTLS13,
}

func (c *Config) setMinVersion(value any) error {
	if isNil(value) {
		return invalidType(value)
	}
	var version uint16
	if text, ok := asText(value); ok {
		version = tlsVersions[text]
	} else {
		n, err := integer(value)
		if err != nil {
			return err
		}
		for _, known := range tlsVersions {
			if n == int64(known) {
				version = known
			}
		}
	}
	if version == 0 {
		return fmt.Errorf("%v is not a tls version", value)
	}
	c.changeTLS(func(t *tls.Config) { t.MinVersion = version })
	return nil
}

func toPath(value any) (string, error) {
	path, ok := asText(value)
	if !ok {
		return "", fmt.Errorf("%v is not a string", value)
	}
	return path, nil
}

// OptionError is an option that [Config.Set] or [Config.Validate] refused. Use [errors.As] to reach it; behind an error of
// Validate there may be several, each found by walking Unwrap() []error. The known texts are those of go-nsq:
//
//	invalid option max_inflight
//	failed to coerce option max_attempts (x) - strconv.ParseInt: parsing "x": invalid syntax
//	invalid deflate_level ! 10 > 9
//	HeartbeatInterval 1m10s must be less than ReadTimeout 1m0s
type OptionError struct {
	Option string // the option's name as given to Set (with underscores), or the field's as Validate tells it
	Value  any    // what was refused; nil if that is the Config itself or the option is unknown, and never a secret
	Reason string // why, for people: "> 9"
	Err    error  // the cause, or nil

	kind optionErrorKind
}

// optionErrorKind tells which of go-nsq's texts an OptionError has.
type optionErrorKind int

const (
	optionOutOfRange  optionErrorKind = iota // also for what has no kind of its own
	optionCoerce                             // the value cannot be converted
	optionUnknown                            // no such option
	optionContradicts                        // right by itself, wrong beside another one
	optionNotCreated                         // the Config is nil or a literal
)

func coerceError(name string, value any, err error) *OptionError {
	return &OptionError{Option: name, Value: value, Reason: err.Error(), Err: err, kind: optionCoerce}
}

// Error returns one line that names the option, the value and the reason.
func (e *OptionError) Error() string {
	switch e.kind {
	case optionCoerce:
		return fmt.Sprintf("failed to coerce option %s (%v) - %s", e.Option, e.Value, e.Reason)
	case optionUnknown:
		return "invalid option " + e.Option
	case optionContradicts:
		return fmt.Sprintf("%s %v %s", e.Option, e.Value, e.Reason)
	case optionNotCreated:
		return e.Reason
	default:
		return fmt.Sprintf("invalid %s ! %v %s", e.Option, e.Value, e.Reason)
	}
}

// Unwrap returns the cause, for example the [*fs.PathError] of a missing certificate. It may be nil.
func (e *OptionError) Unwrap() error { return e.Err }
