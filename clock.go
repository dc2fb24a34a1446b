package nsq

import "time"

// clockStart is the zero of monotonic.
var clockStart = time.Now()

// monotonic returns nanoseconds of a clock that nobody sets. It is what deadlines of messages are kept in: eight bytes
// and cheap to read, once per read of a connection and once per message that a handler takes.
func monotonic() int64 { return int64(time.Since(clockStart)) }

// instant is the time.Time of a reading of monotonic, the zero time for 0.
func instant(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return clockStart.Add(time.Duration(ns))
}
