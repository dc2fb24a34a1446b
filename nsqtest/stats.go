package nsqtest

// Stats is what an nsqd tells about itself.
type Stats struct {
	Version   string        `json:"version"`
	Health    string        `json:"health"` // "OK" if all is well
	Topics    []TopicStats  `json:"topics"`
	Producers []ClientStats `json:"producers"` // connections that have published and not subscribed
}

// TopicStats is one topic of an nsqd. Depths count what no channel has taken yet, in memory and on disk together.
type TopicStats struct {
	Name         string         `json:"topic_name"`
	Channels     []ChannelStats `json:"channels"`
	Depth        int64          `json:"depth"`
	BackendDepth int64          `json:"backend_depth"` // the part of Depth that is on disk
	MessageCount uint64         `json:"message_count"` // since nsqd's start
	MessageBytes uint64         `json:"message_bytes"` // since nsqd's start
	Paused       bool           `json:"paused"`
}

// ChannelStats is one channel of a topic. All counts but Depth, InFlight and Deferred begin at nsqd's start.
type ChannelStats struct {
	Name         string        `json:"channel_name"`
	Depth        int64         `json:"depth"`           // messages waiting, in memory and on disk; neither in flight nor deferred
	BackendDepth int64         `json:"backend_depth"`   // the part of Depth that is on disk
	InFlight     int           `json:"in_flight_count"` // sent to a consumer and not answered
	Deferred     int           `json:"deferred_count"`  // waiting for their time: REQ or DPUB with a delay
	MessageCount uint64        `json:"message_count"`   // messages that came into the channel
	RequeueCount uint64        `json:"requeue_count"`
	TimeoutCount uint64        `json:"timeout_count"`
	Clients      []ClientStats `json:"clients"`
	Paused       bool          `json:"paused"`
}

// ClientStats is one connection, as nsqd sees it.
type ClientStats struct {
	ClientID        string `json:"client_id"`
	Hostname        string `json:"hostname"`
	UserAgent       string `json:"user_agent"`
	RemoteAddress   string `json:"remote_address"`
	State           int    `json:"state"`           // 3 subscribed, 4 closing (CLS received)
	RDY             int64  `json:"ready_count"`     // the RDY in effect
	InFlight        int64  `json:"in_flight_count"` // messages sent to it and not answered
	MessageCount    uint64 `json:"message_count"`   // messages sent to it
	FinishCount     uint64 `json:"finish_count"`
	RequeueCount    uint64 `json:"requeue_count"` // REQ received; timeouts don't count
	ConnectTime     int64  `json:"connect_ts"`    // seconds since 1970
	SampleRate      int    `json:"sample_rate"`   // percent, 0 for all
	TLS             bool   `json:"tls"`
	TLSVersion      string `json:"tls_version"`
	TLSCipherSuite  string `json:"tls_cipher_suite"`
	Deflate         bool   `json:"deflate"`
	Snappy          bool   `json:"snappy"`
	Authed          bool   `json:"authed"`
	AuthIdentity    string `json:"auth_identity"`
	AuthIdentityURL string `json:"auth_identity_url"`

	PubCounts []PubCount `json:"pub_counts"` // for producers
}

// PubCount is how much a connection has published to a topic.
type PubCount struct {
	Topic string `json:"topic"`
	Count uint64 `json:"count"`
}
