package nsqtest

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nsqio/nsq/nsqd"
)

// NSQDOptions says how an nsqd differs from the usual. The zero value of a field leaves nsqd's default (or that of this
// package, see its page) in place. The struct is copied; its slices must not be changed later.
type NSQDOptions struct {
	TCPAddress  string // "host:port" to listen on, or the path of a Unix socket; default a free port of 127.0.0.1
	HTTPAddress string // "host:port" for HTTP; default a free port of 127.0.0.1

	// BroadcastTCPAddr is the "host:port" that nsqlookupd gives to consumers. Default TCPAddress. Name a Proxy's address here to
	// have consumers that ask nsqlookupd come through the proxy.
	BroadcastTCPAddr string

	// LookupdTCPAddresses are the nsqlookupds to register with, see [NSQLookupd.TCPAddr].
	LookupdTCPAddresses []string

	// DataPath is the directory for messages and metadata, which must exist. Default a temporary one, which is removed at the end.
	DataPath     string
	MemQueueSize int64 // messages kept in memory per topic and channel, the rest on disk; default 10000, -1 for none in memory
	SyncEvery    int64 // messages until the next fsync; default 2500

	MsgTimeout           time.Duration // default 60s
	MaxMsgTimeout        time.Duration // default 15m
	MaxMsgSize           int64         // bytes; default 1 MiB
	MaxRDYCount          int64         // default 2500
	MaxHeartbeatInterval time.Duration // default 60s
	MaxChannelConsumers  int           // default 0: no limit

	QueueScanInterval        time.Duration // between looks for messages that timed out or are due; default 10ms
	QueueScanRefreshInterval time.Duration // until a new channel is looked at; default 50ms

	NoDeflate bool // don't offer deflate
	NoSnappy  bool // don't offer snappy

	Certificates  *Certificates // offer TLS; default nil, no TLS
	TLSRequired   bool          // refuse connections without TLS; HTTP stays plain
	TLSClientAuth string        // "require" any certificate or "require-verify" one of the CA; both imply TLSRequired

	AuthHTTPAddresses []string // auth servers, see [AuthServer.Addr]; default none, AUTH is off

	// Logf gets nsqd's log line by line, from nsqd's goroutines. Default nil: no log. It isn't called once nsqd has stopped.
	Logf func(format string, args ...any)

	// Tune may change whatever is left, just before each start. Addresses and Logger must stay.
	Tune func(*nsqd.Options)
}

// nodeIDs gives each nsqd of a process another part in its message IDs, as it is in a well configured cluster.
var nodeIDs atomic.Int64

// maxNodeID is nsqd's limit, exclusive.
const maxNodeID = 1024

func nextNodeID() int64 { return (int64(os.Getpid()) + nodeIDs.Add(1)) % maxNodeID }

// build makes nsqd's own options of ours. It is called for each start, as nsqd changes what it is given.
func (o *NSQDOptions) build(id int64) (*nsqd.Options, error) {
	opts := nsqd.NewOptions()
	opts.ID = id
	opts.TCPAddress = o.TCPAddress
	opts.HTTPAddress = o.HTTPAddress
	opts.HTTPSAddress = ""
	opts.BroadcastAddress = "127.0.0.1"
	opts.DataPath = o.DataPath
	opts.NSQLookupdTCPAddresses = slices.Clone(o.LookupdTCPAddresses)
	opts.AuthHTTPAddresses = o.AuthHTTPAddresses
	opts.QueueScanInterval = 10 * time.Millisecond
	opts.QueueScanRefreshInterval = 50 * time.Millisecond
	opts.DeflateEnabled = !o.NoDeflate
	opts.SnappyEnabled = !o.NoSnappy
	o.setLimits(opts)
	o.setTLS(opts)
	if err := o.setBroadcast(opts); err != nil {
		return nil, err
	}
	if o.Tune != nil {
		o.Tune(opts)
	}
	return opts, nil
}

func (o *NSQDOptions) setLimits(opts *nsqd.Options) {
	set(&opts.SyncEvery, o.SyncEvery)
	set(&opts.MsgTimeout, o.MsgTimeout)
	set(&opts.MaxMsgTimeout, o.MaxMsgTimeout)
	set(&opts.MaxMsgSize, o.MaxMsgSize)
	set(&opts.MaxRdyCount, o.MaxRDYCount)
	set(&opts.MaxHeartbeatInterval, o.MaxHeartbeatInterval)
	set(&opts.MaxChannelConsumers, o.MaxChannelConsumers)
	set(&opts.QueueScanInterval, o.QueueScanInterval)
	set(&opts.QueueScanRefreshInterval, o.QueueScanRefreshInterval)
	set(&opts.MemQueueSize, o.MemQueueSize)
	opts.MemQueueSize = max(opts.MemQueueSize, 0)
}

// set stores a value unless it is zero.
func set[T comparable](field *T, value T) {
	var zero T
	if value != zero {
		*field = value
	}
}

func (o *NSQDOptions) setTLS(opts *nsqd.Options) {
	if o.Certificates != nil {
		opts.TLSCert = o.Certificates.ServerCertFile
		opts.TLSKey = o.Certificates.ServerKeyFile
		opts.TLSRootCAFile = o.Certificates.CAFile
	}
	opts.TLSClientAuthPolicy = o.TLSClientAuth
	if o.TLSRequired || o.TLSClientAuth != "" {
		// nsqd's choice for a policy would be TLS for HTTP as well, and cut off the methods of Node.
		opts.TLSRequired = nsqd.TLSRequiredExceptHTTP
	}
}

func (o *NSQDOptions) setBroadcast(opts *nsqd.Options) error {
	if o.BroadcastTCPAddr == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(o.BroadcastTCPAddr)
	if err != nil {
		return fmt.Errorf("nsqtest: BroadcastTCPAddr: %w", err)
	}
	opts.BroadcastAddress = host
	if opts.BroadcastTCPPort, err = portOf(o.BroadcastTCPAddr); err != nil {
		return fmt.Errorf("nsqtest: BroadcastTCPAddr: %w", err)
	}
	return nil
}
