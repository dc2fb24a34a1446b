package nsq

import "strings"

// ConfigFlag makes the options of a Config a command line flag, which may be given several times. It is a flag.Value:
//
//	cfg := nsq.NewConfig()
//	flag.Var(&nsq.ConfigFlag{Config: cfg}, "consumer-opt", "option of the consumer, as name,value (may be repeated)")
//
// and then -consumer-opt=max_in_flight,200 -consumer-opt=tls_v1.
type ConfigFlag struct {
	Config *Config // from NewConfig
}

// Set takes "name,value", split at the first comma, or "name" alone, which sets a bool to true. Errors are those of
// [Config.Set].
func (f *ConfigFlag) Set(opt string) error {
	name, value, found := strings.Cut(opt, ",")
	if !found {
		return f.config().Set(name, true)
	}
	return f.config().Set(name, value)
}

// String always returns "", because there is no single value to show.
func (f *ConfigFlag) String() string { return "" }

// config returns nil, which Config.Set answers with an error, also for a nil flag.
func (f *ConfigFlag) config() *Config {
	if f == nil {
		return nil
	}
	return f.Config
}
