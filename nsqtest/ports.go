package nsqtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
)

// Port numbers come from below the ranges that systems hand out for outgoing connections (32768 and up on Linux, 49152 and
// up elsewhere). A number from there could be lost while its server is stopped, and to the very client that waits
// for the server: connecting over and over, it may be given the target's own number and so connect to itself.
const (
	firstPort = 20000
	portCount = 12000
)

// nextPort walks through the range. The start differs from process to process, as several may run tests at once; within
// one, no number comes twice before all have had their turn.
var nextPort atomic.Uint32

func init() { nextPort.Store(rand.Uint32N(portCount)) }

// freeAddr returns an address of 127.0.0.1 that nobody listens on.
func freeAddr() (string, error) {
	var last error
	for range portCount {
		port := firstPort + nextPort.Add(1)%portCount
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port)))
		if last = probe(addr); last == nil {
			return addr, nil
		}
	}
	return "", fmt.Errorf("nsqtest: no free port: %w", last)
}

// addrOr returns addr, or a free address if it is empty.
func addrOr(addr string) (string, error) {
	if addr != "" {
		return addr, nil
	}
	return freeAddr()
}

// portOf returns the port number of a "host:port".
func portOf(addr string) (int, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(port)
}

// probe tells whether addr can be listened on. What is no "host:port" is the path of a Unix socket, as for nsqd.
func probe(addr string) error {
	network := "tcp"
	if _, _, err := net.SplitHostPort(addr); err != nil {
		network = "unix"
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		return err
	}
	return l.Close()
}

const (
	startTries = 10
	startPause = 50 * time.Millisecond
)

// startOn calls start once all addresses can be listened on, and again if it fails: a port that was in use a moment ago is
// often on its way out. The error is that of the first try.
func startOn(addrs []string, start func() error) error {
	var first error
	for range startTries {
		err := probeAll(addrs)
		if err == nil {
			err = start()
		}
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
		// A New that fails halfway keeps the listener and the directory lock that it has got so far. They are
		// out of reach, but closed when collected.
		runtime.GC()
		time.Sleep(startPause) // nothing tells when another process lets go of a port
	}
	return first
}

func probeAll(addrs []string) error {
	var errs []error
	for _, addr := range addrs {
		errs = append(errs, probe(addr))
	}
	return errors.Join(errs...)
}
