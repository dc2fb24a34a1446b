package nsq

import "time"

// clockStart is the zero of monotonic. It lies well in the past, so that every reading is above 0, which stands for never,
// in synctest bubbles too, where it is the year 2000.
var clockStart = time.Now().Add(-50 * 365 * 24 * time.Hour) // Add keeps the monotonic reading

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
