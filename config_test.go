package nsq

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type (
	namedDuration time.Duration
	namedInt      int
	namedText     string
)

// validText returns texts for an option and the value that its field has after each.
func validText(t *testing.T, o option) map[string]any {
	switch o.typ {
	case durationType:
		texts := map[string]any{}
		for _, text := range []string{o.def, o.min, o.max, o.off} {
			if text != "" {
				d, err := time.ParseDuration(text)
				require.NoError(t, err, "tag of %s", o.field)
				texts[text] = d
			}
		}
		if o.min == "" || o.min == "0" {
			texts["1h"] = time.Hour
			if o.max == "" {
				texts["1000h0m0.000000001s"] = 1000*time.Hour + 1
			}
		}
		return texts
	case addrType:
		return map[string]any{
			"127.0.0.1:0": &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)},
			"[::1]:4150":  &net.TCPAddr{IP: net.IPv6loopback, Port: 4150},
		}
	}
	switch o.typ.Kind() {
	case reflect.Bool:
		return map[string]any{"true": !o.inverted, "1": !o.inverted, "false": o.inverted, "F": o.inverted}
	case reflect.String:
		return map[string]any{"": "", "x,y z": "x,y z", "12": "12"}
	case reflect.Float64:
		return map[string]any{"0": 0.0, "0.25": 0.25, "1": 1.0, "1e-3": 0.001}
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint16:
		texts := map[string]any{}
		for _, text := range []string{o.def, o.min, o.max, o.off, "5"} {
			if text != "" {
				n, err := strconv.ParseInt(text, 10, 64)
				require.NoError(t, err, "tag of %s", o.field)
				texts[text] = reflect.ValueOf(n).Convert(o.typ).Interface()
			}
		}
		return texts
	}
	return nil
}

// validValue returns a Go value of the field's own type that is not the default.
func validValue(t *testing.T, o option) any {
	switch {
	case o.name == "dial":
		return (&net.Dialer{}).DialContext
	case o.name == "tls_config":
		return &tls.Config{ServerName: "nsqd"}
	case o.typ == addrType:
		return &net.UnixAddr{Name: "x"}
	case o.typ == strategyType:
		return &FullJitterStrategy{}
	case o.typ == durationType:
		return 1234 * time.Millisecond
	}
	switch o.typ.Kind() {
	case reflect.Bool:
		return true
	case reflect.String:
		return "some text"
	case reflect.Float64:
		return 0.75
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint16:
		return reflect.ValueOf(3).Convert(o.typ).Interface()
	case reflect.Pointer, reflect.Func:
		if !reflect.Zero(o.typ).IsNil() { // never; new kinds of options come here
			t.Fatalf("no value for %s", o.name)
		}
	}
	return nil
}

// requireRefused checks that err is an *OptionError with that text.
func requireRefused(t *testing.T, err error, text string, about ...any) {
	t.Helper()
	var refused *OptionError
	require.ErrorAs(t, err, &refused, about...)
	require.Equal(t, text, err.Error(), about...)
}

// requireSetRefused checks that the option can't be set to the value, and that the attempt changes nothing.
func requireSetRefused(t *testing.T, name string, value any) *OptionError {
	t.Helper()
	c := NewConfig()
	before := *c
	err := c.Set(name, value)
	var refused *OptionError
	require.ErrorAs(t, err, &refused, "%s: %T %v", name, value, value)
	require.Equal(t, name, refused.Option)
	require.NotEmpty(t, refused.Reason)
	before.Dial, c.Dial = nil, nil // funcs can't be compared
	require.Equal(t, before, *c, "%s: %T %v", name, value, value)
	return refused
}

// requireInRange checks that Validate finds nothing but rules between options.
func requireInRange(t *testing.T, c *Config) {
	t.Helper()
	for _, problem := range problems(c.Validate()) {
		require.Equal(t, optionContradicts, problem.kind, "%v", problem)
	}
}

func TestOptionTags(t *testing.T) {
	require.LessOrEqual(t, len(options()), 64, "Config.explicit is full")
	names := map[string]bool{}
	for i, o := range options() {
		require.Equal(t, i, o.index)
		require.False(t, names[o.name], "%s: twice", o.name)
		require.NotContains(t, tlsOptions, o.name)
		names[o.name] = true
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if f.IsExported() {
			require.NotEmpty(t, f.Tag.Get("opt"), "Config.%s can't be reached by Set", f.Name)
		}
	}
}

func TestNewConfigHasDefaults(t *testing.T) {
	c := NewConfig()
	require.NoError(t, c.Validate())

	host, err := os.Hostname()
	require.NoError(t, err)
	require.Equal(t, host, c.Hostname)
	require.Equal(t, strings.Split(host, ".")[0], c.ClientID)
	require.True(t, strings.HasSuffix(c.UserAgent, "/"+VERSION), c.UserAgent)
	require.IsType(t, &ExponentialStrategy{}, c.BackoffStrategy)

	// Spelled out, because programs rely on them: api-compat.md is the source, not the tags.
	want := Config{
		DialTimeout: time.Second, ReadTimeout: time.Minute, WriteTimeout: 10 * time.Second,
		ReconnectInterval: 250 * time.Millisecond, MaxReconnectInterval: 15 * time.Second,
		LookupdPollInterval: time.Minute, LookupdPollJitter: 0.3, LookupdPollTimeout: time.Minute, VanishTimeout: time.Minute,
		MaxRequeueDelay: 15 * time.Minute, DefaultRequeueDelay: 90 * time.Second,
		MaxBackoffDuration: 2 * time.Minute, BackoffMultiplier: time.Second, MaxAttempts: 5,
		LowRdyIdleTimeout: 10 * time.Second, LowRdyTimeout: 30 * time.Second,
		RDYTurnIdle: 500 * time.Millisecond, RDYTurnBusy: 2 * time.Second, RDYRedistributeInterval: 5 * time.Second,
		HeartbeatInterval: 30 * time.Second, DeflateLevel: 6,
		OutputBufferSize: 16384, OutputBufferTimeout: 250 * time.Millisecond,
		MaxInFlight: 1, LookupdAuthorization: true, ShutdownTimeout: 30 * time.Second,

		BackoffStrategy: c.BackoffStrategy, Hostname: c.Hostname, ClientID: c.ClientID, UserAgent: c.UserAgent, created: true,
	}
	require.Equal(t, want, *c)
	require.NotSame(t, c.BackoffStrategy, NewConfig().BackoffStrategy)
}

func TestSetReadBack(t *testing.T) {
	for _, o := range options() {
		t.Run(o.name, func(t *testing.T) {
			for text, want := range validText(t, o) {
				for _, value := range []any{text, namedText(text)} {
					c := NewConfig()
					require.NoError(t, c.Set(o.name, value), "%q", text)
					got := o.in(c).Interface()
					if addr, ok := want.(*net.TCPAddr); ok { // 4 and 16 byte forms
						require.Equal(t, addr.String(), got.(net.Addr).String())
						continue
					}
					require.Equal(t, want, got, "%q", text)
					requireInRange(t, c)
				}
			}

			value := validValue(t, o)
			if value == nil {
				t.Fatalf("a new type of option, %v, needs a value in validValue", o.typ)
			}
			c := NewConfig()
			require.NoError(t, c.Set(strings.ReplaceAll(o.name, "_", "-"), value))
			if o.inverted {
				value = !value.(bool)
			}
			got := o.in(c).Interface()
			if o.typ.Kind() == reflect.Func {
				require.Equal(t, reflect.ValueOf(value).Pointer(), reflect.ValueOf(got).Pointer())
			} else {
				require.Equal(t, value, got)
			}
			requireInRange(t, c)
		})
	}
}

func TestSetAndValidateRefuseOutOfRange(t *testing.T) {
	for _, o := range options() {
		for end, limit := range map[string]reflect.Value{"<": o.lo, ">": o.hi} {
			if !limit.IsValid() {
				continue
			}
			step := map[string]float64{"<": -1, ">": 1}[end]
			var value any
			switch {
			case limit.CanFloat():
				value = limit.Float() + step/1024
			case o.typ == durationType:
				value = time.Duration(limit.Int()) + time.Duration(step)*2 // -2, because -1 may mean off
			case limit.Int() == math.MinInt64 || limit.Int() == math.MaxInt64:
				continue // nothing beyond
			case o.off != "" && end == "<":
				value = limit.Int() - 2
			default:
				value = limit.Int() + int64(step)
			}
			t.Run(fmt.Sprint(o.name, end), func(t *testing.T) {
				refused := requireSetRefused(t, o.name, value)
				require.Equal(t, fmt.Sprintf("invalid %s ! %v %s %v", o.name, value, end, limit), refused.Error())
				if o.typ != durationType {
					require.Equal(t, refused.Error(), requireSetRefused(t, o.name, fmt.Sprint(value)).Error())
				}

				c := NewConfig()
				field := o.in(c)
				wide := reflect.ValueOf(value)
				if wide.CanInt() && (field.CanUint() || field.OverflowInt(wide.Int())) {
					return // the field can't hold it
				}
				field.Set(wide.Convert(o.typ))
				text := fmt.Sprintf("invalid %s ! %v %s %v", o.field, value, end, limit)
				found := problems(c.Validate())
				require.NotEmpty(t, found)
				require.Equal(t, text, found[0].Error())
			})
		}
	}
}

func TestSetRefusesWrongTypes(t *testing.T) {
	var (
		noAddr     *net.TCPAddr
		noStrategy *ExponentialStrategy
		noTLS      *tls.Config
		noDial     func(context.Context, string, string) (net.Conn, error)
		noBytes    []byte
		number     = 5
	)
	// No option takes one of these.
	for _, value := range []any{nil, noAddr, noStrategy, noTLS, noDial, noBytes, struct{ A int }{1}, map[string]int{}, &number,
		func() {}, make(chan int), 1i, [2]int{}} {
		for _, o := range options() {
			requireSetRefused(t, o.name, value)
		}
		for name := range tlsOptions {
			requireSetRefused(t, name, value)
		}
	}

	for name, values := range map[string][]any{
		"read_timeout": {"", "1500", "1.5", "x", 1.5, true, int8(100), uint8(100), namedInt(500), namedDuration(time.Second),
			int64(math.MaxInt64), int64(math.MinInt64), uint64(math.MaxUint64), math.NaN(), "99999999999h"},
		"heartbeat_interval": {"-1", "-1ms", int8(-1), -2, time.Duration(-2), namedDuration(-1), -time.Second, int64(math.MinInt64)},
		"msg_timeout":        {int64(math.MaxInt64), uint64(math.MaxUint64), int64(math.MaxInt64/1_000_000 + 1), -1, "-1ns"},
		"max_attempts":       {70000, -1, "70000", "-1", 1.0, float32(1), true, " 5", "5 ", "0x5", "5.0", "", time.Second, uint64(math.MaxUint64)},
		"max_in_flight":      {"99999999999999999999", uint64(1 << 63), time.Second, math.Inf(1), []byte("5")},
		"max_msg_size":       {int64(1 << 31), "2147483648"},
		"output_buffer_size": {uint64(1 << 63), -2, "-2"},
		"lookupd_poll_jitter": {math.NaN(), math.Inf(1), math.Inf(-1), float32(1.5), "NaN", "inf", "", "x", 2, -1, true,
			time.Second, uint64(math.MaxUint64)},
		"tls_v1":                   {"", "yes", "2", 1.0, time.Second},
		"tls_insecure_skip_verify": {"", "yes", 1.0},
		"local_addr":               {"127.0.0.1", "127.0.0.1:x", 5, net.IPv4zero},
		"backoff_strategy":         {"EXPONENTIAL", "fibonacci", 5, ExponentialStrategy{}},
		"dial":                     {"net.Dial", "", net.Dial, true},
		"tls_config":               {"", "x", tls.Config{}, true},
		"tls_cert":                 {5, true},
		"tls_key":                  {5, true, []byte("x")},
		"tls_root_ca_file":         {5, "", "/does/not/exist"},
		"tls_min_version":          {"", "1.2", "TLS1.2", "tls1.4", 12, 0, -64764, 0x10303, 1.2, true},
	} {
		for _, value := range values {
			requireSetRefused(t, name, value)
		}
	}
}

func TestSetConverts(t *testing.T) {
	for about, test := range map[string]struct {
		name  string
		value any
		want  any
	}{
		"int is milliseconds":        {"write_timeout", 1500, 1500 * time.Millisecond},
		"int16 is milliseconds":      {"write_timeout", int16(1500), 1500 * time.Millisecond},
		"int32 is milliseconds":      {"write_timeout", int32(1500), 1500 * time.Millisecond},
		"int64 is milliseconds":      {"write_timeout", int64(1500), 1500 * time.Millisecond},
		"uint is milliseconds":       {"write_timeout", uint(1500), 1500 * time.Millisecond},
		"uint16 is milliseconds":     {"write_timeout", uint16(1500), 1500 * time.Millisecond},
		"uint32 is milliseconds":     {"write_timeout", uint32(1500), 1500 * time.Millisecond},
		"uint64 is milliseconds":     {"write_timeout", uint64(1500), 1500 * time.Millisecond},
		"read timeout off":           {"read_timeout", 0, time.Duration(0)},
		"write timeout off":          {"write_timeout", "0s", time.Duration(0)},
		"heartbeat off, int":         {"heartbeat_interval", -1, time.Duration(-1)},
		"heartbeat off, int64":       {"heartbeat_interval", int64(-1), time.Duration(-1)},
		"heartbeat off, duration":    {"heartbeat_interval", time.Duration(-1), time.Duration(-1)},
		"heartbeat off, text":        {"heartbeat_interval", "-1ns", time.Duration(-1)},
		"nsqd's heartbeat":           {"heartbeat_interval", 0, time.Duration(0)},
		"heartbeat in milliseconds":  {"heartbeat_interval", 1, time.Millisecond},
		"output buffer timeout off":  {"output_buffer_timeout", -1, time.Duration(-1)},
		"largest number of ms":       {"msg_timeout", int64(math.MaxInt64 / 1_000_000), math.MaxInt64 / 1_000_000 * time.Millisecond},
		"int8 for an integer":        {"deflate_level", int8(3), 3},
		"named int for an integer":   {"deflate_level", namedInt(3), 3},
		"json number for an integer": {"deflate_level", json.Number("3"), 3},
		"largest max_attempts":       {"max_attempts", 65535, uint16(65535)},
		"float32":                    {"lookupd_poll_jitter", float32(0.5), 0.5},
		"int for a float":            {"lookupd_poll_jitter", 1, 1.0},
		"bool from int":              {"tls_v1", -3, true},
		"bool from zero":             {"tls_v1", uint8(0), false},
		"bool from a large uint":     {"tls_v1", uint64(math.MaxUint64), true},
		"string from int":            {"user_agent", 12, "12"},
		"string from named int":      {"user_agent", namedInt(12), "12"},
		"string from float":          {"user_agent", 1.5, "1.500000"},
		"string from bool":           {"user_agent", true, "true"},
		"string from bytes":          {"user_agent", []byte("x"), "x"},
		"string from Stringer":       {"user_agent", time.Second, "1s"},
		"string from error":          {"user_agent", errors.New("x"), "x"},
		"skip means skip":            {"skip_lookupd_authorization", true, false},
		"don't skip":                 {"skip_lookupd_authorization", "false", true},
		"any local port":             {"local_addr", ":0", &net.TCPAddr{}},
		"foreign address":            {"local_addr", &net.UnixAddr{Name: "x"}, &net.UnixAddr{Name: "x"}},
		"largest int64":              {"output_buffer_size", uint64(math.MaxInt64), int64(math.MaxInt64)},
		"output buffer off":          {"output_buffer_size", "-1", int64(-1)},
		"largest int32":              {"max_msg_size", math.MaxInt32, int32(math.MaxInt32)},
		"no jitter":                  {"lookupd_poll_jitter", "0.0", 0.0},
	} {
		t.Run(about, func(t *testing.T) {
			c := NewConfig()
			require.NoError(t, c.Set(test.name, test.value))
			require.Equal(t, test.want, optionNamed(test.name).in(c).Interface())
			require.NoError(t, c.Validate())
		})
	}
}

// The texts are go-nsq's, seen on v1.1.0; programs match parts of them.
func TestSetErrorTexts(t *testing.T) {
	for _, test := range []struct {
		name  string
		value any
		want  string
	}{
		{"max-inflight", 5, "invalid option max_inflight"},
		{"Read_Timeout", "1s", "invalid option Read_Timeout"},
		{"", "x", "invalid option "},
		{"read_timeout", "10m", "invalid read_timeout ! 10m0s > 5m0s"},
		{"read_timeout", 3, "invalid read_timeout ! 3ms < 100ms"},
		{"read_timeout", "1500", `failed to coerce option read_timeout (1500) - time: missing unit in duration "1500"`},
		{"read_timeout", true, "failed to coerce option read_timeout (true) - invalid value type bool"},
		{"sample_rate", int64(1) << 40, "invalid sample_rate ! 1099511627776 > 99"},
		{"max_attempts", 70000, "invalid max_attempts ! 70000 > 65535"},
		{"max_attempts", "-1", "invalid max_attempts ! -1 < 0"},
		{"max_attempts", "x", `failed to coerce option max_attempts (x) - strconv.ParseInt: parsing "x": invalid syntax`},
		{"max_msg_size", int64(1) << 31, "invalid max_msg_size ! 2147483648 > 2147483647"},
		{"lookupd_poll_jitter", math.NaN(), "invalid lookupd_poll_jitter ! NaN is not a number"},
		{"tls_root_ca_file", 5, "failed to coerce option tls_root_ca_file (5) - 5 is not a string"},
		{"tls_min_version", "tls1.4", "failed to coerce option tls_min_version (tls1.4) - tls1.4 is not a tls version"},
		{"auth_secret", struct{ s string }{"hush"}, "failed to coerce option auth_secret ((hidden)) - invalid value type struct { s string }"},
	} {
		requireRefused(t, NewConfig().Set(test.name, test.value), test.want)
	}
}

func TestConfigNotCreatedByNewConfig(t *testing.T) {
	const text = "Config{} must be created with NewConfig()"
	var none *Config
	for _, c := range []*Config{none, {}, {MaxInFlight: 5}} {
		requireRefused(t, c.Validate(), text)
		requireRefused(t, c.Set("max_in_flight", 5), text)
		requireRefused(t, c.Set("unknown", nil), text)
	}
	byValue := *NewConfig()
	require.NoError(t, byValue.Validate())
}

// problems lists the errors joined in one of Validate.
func problems(err error) (all []*OptionError) {
	var one *OptionError
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			all = append(all, problems(err)...)
		}
	} else if errors.As(err, &one) {
		all = append(all, one)
	}
	return all
}

func TestValidate(t *testing.T) {
	for about, test := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"defaults":                      {func(c *Config) {}, ""},
		"one value too large":           {func(c *Config) { c.DeflateLevel = 100 }, "invalid DeflateLevel ! 100 > 9"},
		"one value too small":           {func(c *Config) { c.MaxInFlight = -1 }, "invalid MaxInFlight ! -1 < 0"},
		"duration":                      {func(c *Config) { c.LookupdPollInterval = time.Hour }, "invalid LookupdPollInterval ! 1h0m0s > 5m0s"},
		"read timeout below its range":  {func(c *Config) { c.ReadTimeout, c.HeartbeatInterval = 1, 0 }, "invalid ReadTimeout ! 1ns < 100ms"},
		"negative read timeout":         {func(c *Config) { c.ReadTimeout, c.HeartbeatInterval = -1, -1 }, "invalid ReadTimeout ! -1ns < 100ms"},
		"read timeout off":              {func(c *Config) { c.ReadTimeout, c.HeartbeatInterval = 0, time.Hour }, ""},
		"write timeout off":             {func(c *Config) { c.WriteTimeout = 0 }, ""},
		"NaN":                           {func(c *Config) { c.LookupdPollJitter = math.NaN() }, "invalid LookupdPollJitter ! NaN is not a number"},
		"infinite":                      {func(c *Config) { c.LookupdPollJitter = math.Inf(1) }, "invalid LookupdPollJitter ! +Inf > 1"},
		"heartbeat equals read timeout": {func(c *Config) { c.ReadTimeout = 30 * time.Second }, ""},
		"heartbeat above read timeout": {func(c *Config) { c.ReadTimeout = time.Second },
			"HeartbeatInterval 30s must be less than ReadTimeout 1s"},
		"heartbeat off":              {func(c *Config) { c.HeartbeatInterval = -1 }, ""},
		"heartbeat below off":        {func(c *Config) { c.HeartbeatInterval = -2 }, "invalid HeartbeatInterval ! -2ns < 0s"},
		"heartbeat -1ms":             {func(c *Config) { c.HeartbeatInterval = -time.Millisecond }, "invalid HeartbeatInterval ! -1ms < 0s"},
		"short heartbeat for fakes":  {func(c *Config) { c.HeartbeatInterval = 10 * time.Millisecond }, ""},
		"output buffer off":          {func(c *Config) { c.OutputBufferSize, c.OutputBufferTimeout = -1, -1 }, ""},
		"negative output buffer":     {func(c *Config) { c.OutputBufferSize = -2 }, "invalid OutputBufferSize ! -2 < 0"},
		"snappy and deflate":         {func(c *Config) { c.Snappy, c.Deflate = true, true }, "Snappy true excludes Deflate true"},
		"reconnect intervals":        {func(c *Config) { c.ReconnectInterval = time.Minute }, "MaxReconnectInterval 15s must not be less than ReconnectInterval 1m0s"},
		"no backoff strategy":        {func(c *Config) { c.BackoffStrategy = nil }, ""},
		"unbound strategy":           {func(c *Config) { c.BackoffStrategy = &FullJitterStrategy{} }, ""},
		"no names":                   {func(c *Config) { c.ClientID, c.Hostname, c.UserAgent = "", "", "" }, ""},
		"TLS versions crossed":       {func(c *Config) { c.TlsConfig = &tls.Config{MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS12} }, "TlsConfig.MinVersion TLS 1.3 must not be above MaxVersion TLS 1.2"},
		"everything that may be off": {func(c *Config) { c.MaxInFlight, c.MaxAttempts, c.MaxBackoffDuration = 0, 0, 0 }, ""},
		"several": {func(c *Config) { c.SampleRate, c.MaxInFlight, c.ReadTimeout = 100, -1, time.Second },
			"invalid SampleRate ! 100 > 99\ninvalid MaxInFlight ! -1 < 0\nHeartbeatInterval 30s must be less than ReadTimeout 1s"},
	} {
		t.Run(about, func(t *testing.T) {
			c := NewConfig()
			test.change(c)
			err := c.Validate()
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			requireRefused(t, err, test.want)
			require.Len(t, problems(err), strings.Count(test.want, "\n")+1)
		})
	}
}

func TestConfigClone(t *testing.T) {
	c := NewConfig()
	c.TlsConfig = &tls.Config{ServerName: "a"}
	c.BackoffStrategy = &FullJitterStrategy{}
	require.NoError(t, c.Set("rdy_turn_idle", "500ms"))

	clone := c.clone()
	c.TlsConfig.ServerName = "b"
	c.MaxInFlight = 7
	c.BackoffMultiplier = time.Hour
	require.NoError(t, c.Set("low_rdy_idle_timeout", "7s"))

	require.NoError(t, clone.Validate())
	require.Equal(t, "a", clone.TlsConfig.ServerName)
	require.Equal(t, 1, clone.MaxInFlight)
	require.Less(t, clone.backoffStrategy().Calculate(0), time.Second, "unbound: reads the clone's multiplier")
	require.Nil(t, c.BackoffStrategy.(*FullJitterStrategy).config(), "the user's value is left as it was")
	require.Equal(t, 500*time.Millisecond, clone.turnIdle())

	c = NewConfig()
	require.Nil(t, c.clone().TlsConfig)
	clone = c.clone()
	c.BackoffMultiplier = time.Minute
	require.Equal(t, 2*time.Minute, clone.backoffStrategy().Calculate(1), "go-nsq's exception")
}

func TestTurns(t *testing.T) {
	type set struct {
		name  string
		value any
	}
	for about, test := range map[string]struct {
		sets       []set
		change     func(*Config)
		idle, busy time.Duration
	}{
		"defaults":                {nil, nil, 500 * time.Millisecond, 2 * time.Second},
		"our options":             {[]set{{"rdy_turn_idle", "1s"}, {"rdy_turn_busy", "3s"}}, nil, time.Second, 3 * time.Second},
		"go-nsq's":                {[]set{{"low_rdy_idle_timeout", "5s"}, {"low_rdy_timeout", "6s"}}, nil, 5 * time.Second, 6 * time.Second},
		"go-nsq's to its default": {[]set{{"low_rdy_idle_timeout", "10s"}, {"low_rdy_timeout", "30s"}}, nil, 10 * time.Second, 30 * time.Second},
		"both: ours":              {[]set{{"rdy_turn_idle", "500ms"}, {"low_rdy_idle_timeout", "5s"}}, nil, 500 * time.Millisecond, 2 * time.Second},
		"a refused Set is none":   {[]set{{"low_rdy_idle_timeout", "1ms"}}, nil, 500 * time.Millisecond, 2 * time.Second},
		"assigned":                {nil, func(c *Config) { c.LowRdyIdleTimeout, c.LowRdyTimeout = 2*time.Second, 4*time.Second }, 2 * time.Second, 4 * time.Second},
		"assigned, both":          {nil, func(c *Config) { c.RDYTurnIdle, c.LowRdyIdleTimeout = time.Second, 2*time.Second }, time.Second, 2 * time.Second},
	} {
		t.Run(about, func(t *testing.T) {
			c := NewConfig()
			for _, s := range test.sets {
				_ = c.Set(s.name, s.value)
			}
			if test.change != nil {
				test.change(c)
			}
			require.Equal(t, test.idle, c.turnIdle())
			require.Equal(t, test.busy, c.turnBusy())
			require.Equal(t, test.idle, c.clone().turnIdle())
		})
	}
}

// newCertificate writes a certificate that signs itself, and its key.
func newCertificate(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)

	certFile, keyFile = filepath.Join(t.TempDir(), name+".crt"), filepath.Join(t.TempDir(), name+".key")
	require.NoError(t, os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), 0o600))
	return certFile, keyFile
}

// commonName is that of the client certificate in effect.
func commonName(t *testing.T, c *Config) string {
	t.Helper()
	require.Len(t, c.TlsConfig.Certificates, 1)
	cert, err := x509.ParseCertificate(c.TlsConfig.Certificates[0].Certificate[0])
	require.NoError(t, err)
	return cert.Subject.CommonName
}

func TestSetClientCertificate(t *testing.T) {
	certA, keyA := newCertificate(t, "a")
	certB, keyB := newCertificate(t, "b")

	t.Run("certificate first", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls_cert", certA))
		requireRefused(t, c.Validate(), "tls_cert "+certA+" needs tls_key")
		require.NoError(t, c.Set("tls_key", keyA))
		require.NoError(t, c.Validate())
		require.Equal(t, "a", commonName(t, c))
	})
	t.Run("key first", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls-key", keyA))
		requireRefused(t, c.Validate(), "tls_key "+keyA+" needs tls_cert")
		require.NoError(t, c.Set("tls-cert", certA))
		require.NoError(t, c.Validate())
		require.Equal(t, "a", commonName(t, c))
	})
	t.Run("same half again", func(t *testing.T) {
		c := NewConfig()
		for _, half := range [][2]string{{"tls_cert", certA}, {"tls_key", keyA}, {"tls_cert", certA}, {"tls_key", keyA}} {
			require.NoError(t, c.Set(half[0], half[1]))
		}
		require.NoError(t, c.Validate())
	})
	t.Run("another pair replaces the first", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls_cert", certA))
		require.NoError(t, c.Set("tls_key", keyA))
		require.NoError(t, c.Set("tls_key", keyB))
		requireRefused(t, c.Validate(), "tls_key "+keyB+" needs tls_cert")
		require.NoError(t, c.Set("tls_cert", certB))
		require.NoError(t, c.Validate())
		require.Equal(t, "b", commonName(t, c))
	})
	t.Run("mismatch", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls_cert", certA))
		require.Error(t, c.Set("tls_key", keyB))
		require.NoError(t, c.Set("tls_key", keyA), "the refused key left no trace")
	})
	t.Run("no such file", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls_cert", certA))
		require.ErrorIs(t, c.Set("tls_key", keyA+"x"), fs.ErrNotExist)
		require.NoError(t, c.Set("tls_key", keyA))
		require.ErrorIs(t, c.Set("tls_key", keyA+"x"), fs.ErrNotExist)
		require.NoError(t, c.Validate())
	})
	t.Run("empty paths, as from unused flags", func(t *testing.T) {
		c := NewConfig()
		require.NoError(t, c.Set("tls_cert", ""))
		require.NoError(t, c.Set("tls_key", ""))
		require.NoError(t, c.Validate())
	})
}

func TestSetTLSOptions(t *testing.T) {
	c := NewConfig()
	ca, key := newCertificate(t, "ca")
	require.NoError(t, c.Set("tls_root_ca_file", ca))
	require.EqualValues(t, tls.VersionTLS12, c.TlsConfig.MinVersion)
	require.Zero(t, c.TlsConfig.MaxVersion)
	require.NotNil(t, c.TlsConfig.RootCAs)
	require.Nil(t, c.TlsConfig.ClientCAs)
	err := c.Set("tls_root_ca_file", key)
	require.ErrorContains(t, err, "failed to append certificates")
	err = c.Set("tls_root_ca_file", "/does/not/exist")
	require.ErrorContains(t, err, "failed to read custom Certificate Authority file")
	require.ErrorIs(t, err, fs.ErrNotExist)

	require.NoError(t, c.Set("tls_insecure_skip_verify", true))
	require.True(t, c.TlsConfig.InsecureSkipVerify)
	require.NoError(t, c.Set("tls_insecure_skip_verify", "0"))
	require.False(t, c.TlsConfig.InsecureSkipVerify)

	for value, want := range map[any]uint16{"ssl3.0": 0x0300, "tls1.0": tls.VersionTLS10, "tls1.1": tls.VersionTLS11,
		"tls1.2": tls.VersionTLS12, "tls1.3": tls.VersionTLS13, tls.VersionTLS13: tls.VersionTLS13, uint16(tls.VersionTLS12): tls.VersionTLS12} {
		require.NoError(t, c.Set("tls-min-version", value))
		require.Equal(t, want, c.TlsConfig.MinVersion)
		require.NotNil(t, c.TlsConfig.RootCAs, "what was set before stays")
	}
	require.False(t, c.TlsV1, "TLS itself is asked for by tls_v1")
}

func TestSetLeavesSharedTLSConfigAlone(t *testing.T) {
	shared := &tls.Config{ServerName: "nsqd"}
	c := NewConfig()
	require.NoError(t, c.Set("tls_config", shared))
	require.Same(t, shared, c.TlsConfig)
	require.NoError(t, c.Set("tls_insecure_skip_verify", true))
	require.NoError(t, c.Set("tls_min_version", "tls1.3"))
	require.False(t, shared.InsecureSkipVerify)
	require.Zero(t, shared.MinVersion)
	require.True(t, c.TlsConfig.InsecureSkipVerify)
	require.Equal(t, "nsqd", c.TlsConfig.ServerName)
}

func TestConfigFlag(t *testing.T) {
	c := NewConfig()
	f := ConfigFlag{c} // unkeyed, as programs have it
	flags := flag.NewFlagSet("test", flag.ContinueOnError)
	flags.SetOutput(t.Output())
	flags.Var(&f, "opt", "")

	require.NoError(t, flags.Parse([]string{"-opt=max-in-flight,7", "-opt", "tls_v1", "-opt=user_agent,a,b=c",
		"-opt=client_id,", "-opt=skip_lookupd_authorization"}))
	require.Equal(t, 7, c.MaxInFlight)
	require.True(t, c.TlsV1)
	require.Equal(t, "a,b=c", c.UserAgent)
	require.Empty(t, c.ClientID)
	require.False(t, c.LookupdAuthorization)
	require.Empty(t, f.String())

	var refused *OptionError
	require.ErrorAs(t, f.Set("max_in_flight"), &refused)
	require.ErrorAs(t, f.Set("tls_cert"), &refused)
	require.ErrorAs(t, f.Set("unknown,5"), &refused)
	require.ErrorAs(t, f.Set(""), &refused)
	require.ErrorAs(t, f.Set(","), &refused)
	require.ErrorAs(t, (&ConfigFlag{}).Set("tls_v1"), &refused)
	var none *ConfigFlag
	require.ErrorAs(t, none.Set("tls_v1"), &refused)
	require.Empty(t, none.String())
}

func TestOptionErrorByHand(t *testing.T) {
	cause := errors.New("cause")
	err := &OptionError{Option: "x", Value: 5, Reason: "is odd", Err: cause}
	require.EqualError(t, err, "invalid x ! 5 is odd")
	require.ErrorIs(t, err, cause)
}

// FuzzConfigSet gives every option any text and any number. Whatever is accepted passes Validate as far as this option
// alone is concerned; whatever is refused says so with an *OptionError and changes nothing.
func FuzzConfigSet(f *testing.F) {
	for _, o := range options() {
		for _, text := range []string{o.def, o.min, o.max, o.off, "-1", "1e999", "NaN", "99999999999999999999"} {
			f.Add(o.name, text, int64(-1), 0.5)
		}
	}
	f.Add("max-in-flight", "5", int64(math.MaxInt64), math.NaN())
	f.Add("tls-min-version", "tls1.3", int64(tls.VersionTLS12), math.Inf(1))
	f.Add("unknown", "", int64(0), 0.0)

	f.Fuzz(func(t *testing.T, name, text string, n int64, fl float64) {
		values := []any{text, []byte(text), n, uint64(n), int32(n), uint16(n), int8(n), time.Duration(n), namedDuration(n), fl,
			float32(fl), n%2 == 0, nil, struct{}{}}
		switch strings.ReplaceAll(name, "-", "_") {
		case "local_addr":
			if host, _, err := net.SplitHostPort(text); err == nil && host != "" && net.ParseIP(host) == nil {
				values = values[1:] // text would make it look up a name
			}
		case "tls_root_ca_file", "tls_cert", "tls_key":
			values = values[1:] // text would make it read a file; FuzzTLSFiles does
		}
		for _, value := range values {
			c := NewConfig()
			before := *c
			if err := c.Set(name, value); err != nil {
				var refused *OptionError
				if !errors.As(err, &refused) {
					t.Fatalf("Set(%q, %T %v): %T %v", name, value, value, err, err)
				}
				if !reflect.DeepEqual(before, *c) {
					t.Fatalf("Set(%q, %T %v) failed, and changed the config", name, value, value)
				}
				if secret := fmt.Sprint(value); strings.Contains(name, "secret") && len(secret) > 5 {
					require.NotContains(t, strings.ReplaceAll(err.Error(), refused.Option, ""), secret)
				}
				continue
			}
			o := optionNamed(strings.ReplaceAll(name, "-", "_"))
			for i := range options() { // what was set is the option's field, and no other
				other := &options()[i]
				if other == o || o == nil && other.name == "tls_config" {
					continue
				}
				if !reflect.DeepEqual(other.in(&before).Interface(), other.in(c).Interface()) {
					t.Fatalf("Set(%q, %T %v) changed %s", name, value, value, other.field)
				}
			}
			if o != nil { // the value of the field is one that Set takes, and it stays what it is
				field := o.in(c).Interface()
				again := field
				if o.inverted {
					again = !field.(bool)
				}
				require.NoError(t, c.Set(name, again))
				if o.typ != strategyType {
					require.True(t, reflect.DeepEqual(field, o.in(c).Interface()) || field != field, "%s: %v", name, field)
				}
			}
			for _, problem := range problems(c.Validate()) {
				if problem.kind != optionContradicts {
					t.Fatalf("Set(%q, %T %v) accepted what Validate refuses: %v", name, value, value, problem)
				}
			}
		}
	})
}
