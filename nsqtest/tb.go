package nsqtest

// TB is the part of testing.TB that this package uses. *testing.T, *testing.B and *testing.F have it.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(f func())
	TempDir() string
}

// closeAfter closes a server when the test ends. A server that doesn't end is worth a line, not a failure: what the test
// was about has been decided by then.
func closeAfter(tb TB, what string, closeServer func() error) {
	tb.Cleanup(func() {
		if err := closeServer(); err != nil {
			tb.Logf("nsqtest: closing %s: %v", what, err)
		}
	})
}
