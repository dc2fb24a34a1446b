package soak

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rdyloop/nsq/nsqtest/internal/left"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// requireNothingLeft is for the moment when all StopChans of this process are closed.
func requireNothingLeft(t *testing.T, ports map[int]bool) {
	t.Helper()
	if sockets := socketsTo(t, ports); len(sockets) > 0 {
		t.Errorf("sockets are left: %v", sockets)
	}
	// The goroutine that closed StopChan may need a moment to return.
	assert.Empty(t, left.Goroutines(200*time.Millisecond), "goroutines of the library")
}

// requireAsBefore is for the moment when the servers have ended as well.
func requireAsBefore(t *testing.T, goroutines, files int) {
	t.Helper()
	for deadline := time.Now().Add(slack); ; time.Sleep(time.Millisecond) {
		g, f := runtime.NumGoroutine(), openFiles(t)
		if g <= goroutines && f <= files {
			return
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			require.Fail(t, "something is left", "%d goroutines, %d before; %d files, %d before\n%s", g, goroutines, f, files, buf[:runtime.Stack(buf, true)])
		}
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0") // the first one opens what the runtime needs for all
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	n, err := left.OpenFiles()
	require.NoError(t, err)
	return n
}

// ports are those that nobody in this process but consumers connects to.
func (cl *cluster) ports(t *testing.T) map[int]bool {
	ports := make(map[int]bool)
	for _, addr := range append(cl.addrs(), cl.lookupdHTTPAddrs()...) {
		_, port, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		ports[n] = true
	}
	return ports
}

// socketsTo lists the open sockets of this process that are connected to one of the ports. Where the system doesn't tell there are none.
func socketsTo(t *testing.T, ports map[int]bool) (sockets []string) {
	t.Helper()
	table, err := os.Open("/proc/self/net/tcp")
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(t, err)
	defer table.Close()
	own := make(map[string]bool)
	links, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil {
			own[target] = true
		}
	}
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || !own["socket:["+fields[9]+"]"] {
			continue
		}
		_, hex, _ := strings.Cut(fields[2], ":")
		if port, err := strconv.ParseInt(hex, 16, 32); err == nil && ports[int(port)] {
			sockets = append(sockets, fmt.Sprintf("%s to port %d, state %s", fields[1], port, fields[3]))
		}
	}
	require.NoError(t, lines.Err())
	return sockets
}

func TestSocketsToFindsOne(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	ports := map[int]bool{listener.Addr().(*net.TCPAddr).Port: true}
	require.Empty(t, socketsTo(t, ports))
	if _, err := os.Stat("/proc/self/net/tcp"); err != nil {
		t.Skip("the system doesn't tell which sockets are open")
	}
	nc, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	require.Len(t, socketsTo(t, ports), 1)
	require.NoError(t, nc.Close())
	require.Empty(t, socketsTo(t, ports))
}

// memory is what the heap held, minute by minute, without the ledger's own entries.
type memory struct {
	heap []int64
}

// watch looks at memory while ctx lasts, and has the ledger forget what is old.
func (s *soak) watch(ctx context.Context) *memory {
	m := &memory{}
	s.lanes.Go(func() {
		start, minute := time.Now(), 1
		for sleep(ctx, 5*time.Second) {
			s.ledger.retire(retireAfter)
			if time.Since(start) < time.Duration(minute)*time.Minute {
				continue
			}
			minute++
			heap, total := s.ledger.heap()
			m.heap = append(m.heap, heap)
			fmt.Printf("%s: %s: heap in use %.1f MiB, %.1f MiB of it without the numbers; %d messages, %d goroutines\n", s.t.Name(),
				time.Since(start).Round(time.Second), float64(total)/(1<<20), float64(heap)/(1<<20), s.ledger.acceptedSoFar(), runtime.NumGoroutine())
		}
	})
	return m
}

// heap is what is in use, with and without what the ledger keeps of each message for good.
func (l *ledger) heap() (without, total int64) {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	l.mu.Lock()
	defer l.mu.Unlock()
	const entrySize = 8
	total = int64(stats.HeapInuse)
	return total - int64(len(l.numbers))*chunk*entrySize, total
}

// check compares the first third with the last. In the first minutes the ledger fills up with what it remembers for a minute.
func (m *memory) check(l *ledger) {
	if len(m.heap) < 10 {
		return
	}
	heap := m.heap[2:]
	third := len(heap) / 3
	first, last := mean(heap[:third]), mean(heap[len(heap)-third:])
	fmt.Printf("heap in use: %.1f MiB at first, %.1f MiB at last\n", first/(1<<20), last/(1<<20))
	if last > 1.25*first+4<<20 {
		l.fail("the heap has grown from %.1f MiB to %.1f MiB", first/(1<<20), last/(1<<20))
	}
}

func mean(values []int64) (m float64) {
	for _, v := range values {
		m += float64(v) / float64(len(values))
	}
	return m
}
